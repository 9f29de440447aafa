"""Lets imaged and netd work only while this host's agent acts for the node.

The credentials of imaged and netd would work on any host. So both services wait for the local
agent's file `<run_dir>/instance`. Before each list of a watch, they compare this file with the
node's instance key on the bus. A service that guests need (`stays`) keeps running without the bus.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from virtbus.bus.client import connection, tracing
from virtbus.bus.client.ports import Bus, EntryKind, Gate
from virtbus.bus.errors import BusError, DeniedError, UnavailableError
from virtbus.bus.runtime import state_version
from virtbus.bus.runtime.process import notify
from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.hosts import read_either
from virtbus.schemas.subjects import node_instance

log = logging.getLogger(__name__)

FILE = "instance"
LOOK_S = 0.1
REPORT_AFTER_S = 5.0
PROVE_S = 10.0
AGAIN_S = 2.0
"""Pause between attempts to connect, because a refused login fails at once."""
SETTLES_S = 2.0
"""Pause before the file and the key are compared again, if they differ.

An agent writes its instance key first, and its file less than SETTLES_S later.
"""


def holds(text: str) -> bool:
    """Return True if `text`, the agent's file, says that the agent holds the node."""
    return _words(text)[:1] == ["held"]


def _words(text: str) -> list[str]:
    """Return the words of the first line: `held` and the instance id, or `refused`, or nothing."""
    return text.partition("\n")[0].split()


def word_in(run_dir: Path) -> Callable[[], str]:
    """Return a function that returns the text of the local agent's file; empty without a file.

    The function reads the file only after a change, so frequent calls are cheap.
    """
    path = run_dir / FILE
    known: tuple[int, ...] = ()
    text = ""

    def read_file() -> str:
        nonlocal known, text
        try:
            found = path.stat()
            if (now := (found.st_ino, found.st_mtime_ns, found.st_size)) != known:
                text = path.read_text(errors="replace")
                known = now
        except OSError:
            known, text = (), ""
        return text

    return read_file


class LocalAgent:
    """Watches whether the agent of this host acts for the node."""

    def __init__(self, bus: Bus, node: str, read_file: Callable[[], str]) -> None:
        self._bus = bus
        self._node = node
        self._key = node_instance(node)
        self._read_file = read_file

    async def gate(self) -> None:
        """Return once the local agent holds the node; raise BusError if the key cannot be read.

        After REPORT_AFTER_S, systemd gets READY. Without READY, systemd's start timeout would end a
        service that still waits for the agent.
        """
        loop = asyncio.get_running_loop()
        begun_s, reported = loop.time(), False
        while not await self._holds():
            if not reported and loop.time() - begun_s > REPORT_AFTER_S:
                reported = True
                notify("READY=1\nSTATUS=waits for the agent of this host")
                text = "waits for the agent of this host: it does not hold the node"
                log.warning(text, extra={"code": "agent_awaited"})
            await asyncio.sleep(LOOK_S)

    async def begin(self) -> None:
        """Wait like `gate`, but retry while the bus is unreachable."""
        while True:
            try:
                return await self.gate()
            except BusError as error:
                log.info("cannot read the node's key: %s", error, extra={"code": "agent_awaited"})
                await asyncio.sleep(SETTLES_S)

    async def keep(self) -> None:
        """Check the agent's file and the instance key until cancelled.

        Raises:
            VirtbusError: 409 `second_instance`: the agent's file says `refused`, or the instance
                key names another instance than the file.
        """
        loop = asyncio.get_running_loop()
        proved_s = loop.time()
        while True:
            await asyncio.sleep(SETTLES_S / 2)
            if self._word()[:1] == ["refused"]:
                raise _lost()
            if loop.time() - proved_s < PROVE_S:
                continue
            proved_s = loop.time()
            if await self._other() and await self._settled():
                raise _lost()

    async def _settled(self) -> bool:
        await asyncio.sleep(SETTLES_S)
        return await self._other()

    async def _other(self) -> bool:
        try:
            holder = await self._holder()
        except BusError:
            return False
        word = self._word()
        return bool(holder) and word[:1] == ["held"] and word[1:] != [holder]

    async def _holds(self) -> bool:
        word = self._word()
        return word[:1] == ["held"] and word[1:] == [await self._holder()]

    def _word(self) -> list[str]:
        return _words(self._read_file())

    async def _holder(self) -> str:
        """Return the instance id in the node's key; empty if the key is missing or invalid.

        The agent that holds the node rewrites an invalid key.
        """
        entry = await self._bus.get(self._key)
        if entry is None or entry.kind is not EntryKind.PUT:
            return ""
        try:
            held = read_either(entry.value)
        except VirtbusError:
            return ""
        return held.instance if held.node == self._node else ""


def _never() -> bool:
    return False


async def serve_with_agent(
    settings: ServiceSettings,
    serve: Callable[[Bus, Gate], Awaitable[None]],
    *,
    stays: Callable[[], bool] = _never,
) -> None:
    """Connect to the bus and run `serve` while this host's agent holds the node.

    While `stays` returns True, connecting is retried instead of raising the errors below.

    Raises:
        UnavailableError: no server of the bus answers.
        DeniedError: the bus refuses the login, or its certificate is not trusted.
    """
    state_version.check(settings.state_dir)
    async with _connected(settings, stays) as bus:
        with tracing.recording(settings.service, settings.node, bus.emit, settings.otlp_endpoint):
            agent = LocalAgent(bus, settings.node, word_in(settings.run_dir))
            await agent.begin()
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.keep())
                await serve(bus, agent.gate)


@asynccontextmanager
async def _connected(settings: ServiceSettings, stays: Callable[[], bool]) -> AsyncIterator[Bus]:
    """Connect to the bus. During retries, systemd gets READY, so that its start timeout passes."""
    bus: Bus | None = None
    said = ""
    async with AsyncExitStack() as stack:
        while bus is None:
            try:
                connecting = connection.connect(settings.bus(), name=settings.service)
                bus = await stack.enter_async_context(connecting)
            except (UnavailableError, DeniedError) as error:
                if not stays():
                    raise
                if str(error) != said:
                    said = str(error)
                    notify("READY=1\nSTATUS=waits for the bus")
                    level = logging.ERROR if isinstance(error, DeniedError) else logging.WARNING
                    log.log(level, "waits for the bus: %s", error, extra={"code": "bus_awaited"})
                await asyncio.sleep(AGAIN_S)
        yield bus


def _lost() -> VirtbusError:
    message = "the agent of this host does not hold the node; this service waits for it"
    return VirtbusError(Code.CONFLICT, "second_instance", message)
