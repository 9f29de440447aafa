"""Serves the sessions of kubelet's clients: consoles and ports of guests, and commands in guests.

The node's agent carries consoles and ports as streams over the bus (ADR 0023). Flow control limits
the unacknowledged bytes of a stream to WINDOW_BYTES, which limits the memory of each session.
"""

from collections.abc import Mapping
from functools import partial

from virtbus.bus.client.streams import ByteStream, opening
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.pod import Machine
from virtbus.cri.core.remote_command import RESIZE, STDIN, STDOUT, Wanted
from virtbus.cri.edge.bus_link import BusLink
from virtbus.cri.edge.guest_shell import Outcome
from virtbus.cri.edge.pipes import Pipe
from virtbus.cri.edge.stream_server import Command, Forward, StreamServer
from virtbus.cri.guest_commands import BOOT_S, GuestCommands, GuestNow
from virtbus.cri.pods import Pods, not_found
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import ConsoleOpen, PortOpen

WINDOW_BYTES = 64 * 1024
DETACH = b"\x1d"
"""Ctrl-]. As in Virtlet, a client that sends this byte alone leaves the console."""
EXEC_WAIT_S = 60.0
"""Maximum wait of an exec for a booting guest."""
ANSWER_S = 5.0
"""Time before a client's deadline at which the wait ends, so that the answer arrives in time."""
LEFT, CLIENT_CLOSED = "the client left", "the client closed the connection"


class Streaming:
    """The sessions, and the calls that begin them."""

    def __init__(self, pods: Pods, link: BusLink, node: str, commands: GuestCommands) -> None:
        self._pods = pods
        self._link = link
        self._node = node
        self._commands = commands
        self.server = StreamServer(self, link.sources)

    # --- calls ----------------------------------------------------------------------------
    def attach(self, request: Plain) -> str:
        """Return the URL of an attach.

        Raises:
            VirtbusError: 400 `streams_invalid`. 404. 409 `not_running`. 429 `too_many_sessions`.
        """
        container_id = self._running(request.get("container_id", ""))
        return self.server.url(Command(container_id, wanted(request)))

    async def exec(self, request: Plain, left_s: float | None) -> str:
        """Return the URL of a command with streams. `left_s` is the time to the client's deadline.

        Raises:
            VirtbusError: 400 `command_empty`. 422 `no_shell`. The errors of `attach`.
        """
        container_id = self._running(request.get("container_id", ""))
        words = _words(request)
        streams = wanted(request)
        wait_s = EXEC_WAIT_S if left_s is None else min(EXEC_WAIT_S, left_s - ANSWER_S)
        await self._commands.check(partial(self._guest, container_id), wait_s)
        return self.server.url(Command(container_id, streams, words))

    async def exec_sync(self, request: Plain) -> Outcome:
        """Run a command without input; return its outcome.

        Raises:
            VirtbusError: 400 `command_empty`. 404. 409 `not_running`. The errors of
                `GuestCommands.run`.
        """
        container_id = self._running(request.get("container_id", ""))
        timeout_s = max(0.0, float(request.get("timeout", 0)))
        guest = partial(self._guest, container_id)
        return await self._commands.run(guest, _words(request), timeout_s)

    def port_forward(self, request: Plain) -> str:
        """Return the URL for connections to a pod's ports.

        Raises VirtbusError 404, 409, 429.
        """
        sandbox_id = request.get("pod_sandbox_id", "")
        self._machine_of_sandbox(sandbox_id)
        return self.server.url(Forward(sandbox_id))

    # --- sessions -------------------------------------------------------------------------
    async def command(self, want: Command, pipes: Mapping[str, Pipe]) -> int:
        """Run a command and return its exit code, or carry the guest's console and return 0.

        Implements `stream_server.Sessions`.
        """
        machine = self._machine(want.container_id)
        if want.words:
            return await self._commands.interactive(machine, want.words, want.wanted, pipes)
        uid = machine.uid
        query = ConsoleOpen(uid=uid, write=want.wanted.stdin, owner="attach")
        subject = subjects.rpc(self._node, "agent", "console")
        bus = self._link.here()
        async with opening(bus, subject, query, window=WINDOW_BYTES) as stream:
            ways = [_show(stream, pipes.get(STDOUT)), _drop(pipes.get(RESIZE))]
            await stream.while_open(*ways, _type(stream, pipes.get(STDIN)))
        return 0

    async def forward(self, want: Forward, port: int, pipe: Pipe) -> None:
        """Carry a connection to a port of the guest. Implements `stream_server.Sessions`."""
        uid = self._machine_of_sandbox(want.sandbox_id).uid
        subject = subjects.rpc(self._node, "agent", "port")
        query = PortOpen(uid=uid, port=port)
        async with opening(self._link.here(), subject, query, window=WINDOW_BYTES) as stream:
            await stream.while_open(_show(stream, pipe), _send(stream, pipe))

    # --- finding --------------------------------------------------------------------------
    def _running(self, wanted_id: str) -> str:
        """Return the full id of a running container.

        Raises VirtbusError 404, 409.
        """
        found = self._pods.find_container(wanted_id)
        if found is None:
            raise not_found("container", wanted_id)
        key, container_id = found
        if self._pods.all[key].container(container_id).phase != "running":
            raise _not_running(f"the container {container_id}")
        return container_id

    def _machine(self, container_id: str) -> Machine:
        container_id = self._running(container_id)
        key, _ = self._pods.find_container(container_id) or ("", "")
        return self._machine_of(key)

    def _guest(self, container_id: str) -> GuestNow:
        machine = self._machine(container_id)
        key, container_id = self._pods.find_container(container_id) or ("", "")
        started_ns = self._pods.all[key].container(container_id).started_ns
        up_s = (self._link.sources.time_ns() - started_ns) / 1e9
        return GuestNow(machine, 0 <= up_s < BOOT_S)

    def _machine_of_sandbox(self, wanted_id: str) -> Machine:
        """Return the VM of a sandbox with a running container.

        Raises VirtbusError 404, 409.
        """
        found = self._pods.find_sandbox(wanted_id)
        if found is None:
            raise not_found("sandbox", wanted_id)
        active = self._pods.all[found[0]].active
        if active is None or active.phase != "running" or active.sandbox_id != found[1]:
            raise _not_running(f"the guest of the sandbox {found[1]}")
        return self._machine_of(found[0])

    def _machine_of(self, key: str) -> Machine:
        machine = self._pods.all[key].machine
        if machine is None:
            raise _not_running("the guest")
        return machine


def wanted(request: Plain) -> Wanted:
    """Return the streams that a request names.

    Raises:
        VirtbusError: 400 `streams_invalid`.
    """
    flags = {name: bool(request.get(name, False)) for name in Wanted._fields}
    if flags["tty"] and flags["stderr"]:
        message = "a terminal has no stderr of its own; leave out stderr, or tty"
        raise VirtbusError(Code.INVALID, "streams_invalid", message)
    if not any(flags[name] for name in ("stdin", "stdout", "stderr")):
        message = "name at least one of stdin, stdout and stderr"
        raise VirtbusError(Code.INVALID, "streams_invalid", message)
    return Wanted(**flags)


def _words(request: Plain) -> tuple[str, ...]:
    """Return the command of a request.

    Raises VirtbusError 400 `command_empty`.
    """
    words = tuple(str(word) for word in request.get("cmd", ()))
    if not words or not words[0]:
        raise VirtbusError(Code.INVALID, "command_empty", "name the program to run in the guest")
    return words


def _not_running(what: str) -> VirtbusError:
    message = f"{what} does not run; start it first"
    return VirtbusError(Code.CONFLICT, "not_running", message)


async def _show(stream: ByteStream, pipe: Pipe | None) -> None:
    """Send the guest's bytes to the client. Without a pipe, drop the bytes."""
    while data := await stream.read():
        if pipe is not None:
            await pipe.write(data)
    if pipe is not None:
        await pipe.finish()


async def _type(stream: ByteStream, pipe: Pipe | None) -> None:
    """Send the client's keys to the guest. The session continues after the end of the keys."""
    while pipe is not None and (keys := await pipe.read()):
        if keys == DETACH:
            stream.end(LEFT)
            return
        await stream.write(keys)


async def _drop(pipe: Pipe | None) -> None:
    """Drop the sizes of the client's terminal, because a serial console has no size."""
    while pipe is not None and await pipe.read():
        pass


async def _send(stream: ByteStream, pipe: Pipe) -> None:
    while data := await pipe.read():
        await stream.write(data)
    if pipe.left:
        stream.end(CLIENT_CLOSED)
    else:
        await stream.finish()
