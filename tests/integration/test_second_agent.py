"""Two real agents with one node's credentials on a real bus: only one acts in every case."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.jetstream_errors import answer_of
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.provisioning import server, stream_setup
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.hosts import Instance
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import encode, read

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NODE = "n1"
WITHIN_S = 40.0


class Wire:
    """A link between an agent and the bus that can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pipes: set[asyncio.StreamWriter] = set()
        self._whole = True
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """The address at which the agent finds the bus."""
        self._server = await asyncio.start_server(self._pipe, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _pipe(self, down: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        if not self._whole:
            back.close()
            return
        up, forth = await asyncio.open_connection("127.0.0.1", self._port)
        self._pipes |= {back, forth}
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(down, forth))
            group.create_task(_copy(up, back))

    def cut(self) -> None:
        self._whole = False
        for writer in self._pipes:
            writer.transport.abort()
        self._pipes.clear()

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


class Agent:
    """A nodeagent's process on a host of its own: a state folder, a run folder, a link."""

    def __init__(self, base: Path, creds: Path, port: int) -> None:
        self.state, self.run = base / "state", base / "run"
        self.wire = Wire(port)
        self._log = base / "log"
        self._creds = creds
        self._process: subprocess.Popen[bytes] | None = None
        self._server = ""
        for folder in (self.state, self.run):
            folder.mkdir(parents=True, exist_ok=True)

    async def start(self) -> None:
        self._server = self._server or await self.wire.open()
        settings = {
            "VIRTBUS_NODE": NODE,
            "VIRTBUS_SERVER": self._server,
            "VIRTBUS_CREDS": str(self._creds),
            "VIRTBUS_STATE_DIR": str(self.state),
            "VIRTBUS_RUN_DIR": str(self.run),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "virtbus.simulator"],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(20)
            self._process = None

    @property
    def word(self) -> str:
        """Return the agent's message to its host: `held` or `refused`."""
        with suppress(OSError):
            return (self.run / "instance").read_text().split()[0]
        return ""

    @property
    def alive(self) -> bool:
        """Return True if the last started process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def vms(self) -> list[str]:
        """Return the domains on which it ever acted."""
        return [path.name for path in (self.state / "vms").glob("*")]

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class Site:
    """A bus with a controller; hosts with the credentials of one node."""

    def __init__(self, nats: server.Server, admin: NatsBus, client: NatsBus, base: Path) -> None:
        self._nats, self._base = nats, base
        self._admin, self.client = admin, client
        self.agents: list[Agent] = []

    def agent(self, state: Path | None = None) -> Agent:
        """Add one more host; `state` is the disk that its own is a copy of."""
        base = self._base / f"host{len(self.agents)}"
        if state is not None:
            copytree(state, base / "state")
        creds = self._base / "run" / f"node-{NODE}.creds"
        made = Agent(base, creds, self._nats.port)
        self.agents.append(made)
        return made

    async def holder(self) -> str:
        entry = await self._admin.get(subjects.node_instance(NODE))
        there = entry is not None and entry.kind is EntryKind.PUT
        return read(Instance, entry.value).instance if entry is not None and there else ""

    async def ask(self, verb: str, **data: Any) -> Any:
        return await self.client.request(f"virtbus.api.v1.{verb}", data, timeout_s=20)

    async def damage(self, key: str, body: bytes) -> None:
        """Write without the checks of our own programs."""
        answer_of(await self._admin._records._persist(key, body, {}))

    async def runs(self, uid: str) -> bool:
        return await self.state(uid, "Running")

    async def state(self, uid: str, state: str) -> bool:
        entry = await self._admin.get(subjects.vm_status(NODE, uid))
        told = entry is not None and entry.kind is EntryKind.PUT
        return entry is not None and told and read(VmStatus, entry.value).state == state


@asynccontextmanager
async def site(base: Path) -> AsyncIterator[Site]:
    """The bus and the controller, up to the end."""
    files = server.ServerFiles(base / "bus", base / "run")
    async with (
        server.running(files, nodes=(NODE,), port=0) as nats,
        connect(nats.settings("admin"), name="test admin") as admin,
        connect(nats.settings("client"), name="test client") as client,
    ):
        await stream_setup.ensure(admin)
        await stream_setup.ensure_node(admin, NODE, encode(JoinNonce(nonce="the bus")))
        environ = {
            "VIRTBUS_SERVER": nats.url,
            "VIRTBUS_CREDS": str(base / "run" / "controller.creds"),
        }
        with (base / "controller.log").open("ab") as log:
            controller = subprocess.Popen(
                [sys.executable, "-m", "virtbus.controller"],
                env={**os.environ, **environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        made = Site(nats, admin, client, base)
        try:
            yield made
        finally:
            for agent in made.agents:
                agent.stop(signal.SIGKILL)
                agent.wire.close()
            controller.kill()
            controller.wait()


async def until(what: Callable[[], bool | Awaitable[bool]], why: str | Callable[[], str]) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                found = what()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(why if isinstance(why, str) else why()) from None


async def first_with_a_vm(made: Site) -> tuple[Agent, str]:
    """An agent that runs a VM."""
    first, uid = made.agent(), uuid7()
    await first.start()
    await until(lambda: first.word == "held", "the first agent holds the node")

    async def created() -> bool:
        try:
            await made.ask("vm.create", name="web", image="tiny", uid=uid)
        except VirtbusError:
            return False
        return True

    await until(created, "the VM is accepted")
    await until(lambda: made.runs(uid), "the VM runs")
    return first, uid


ENDS: dict[str, Callable[[Agent], None]] = {
    "runs": lambda first: None,
    "stopped": Agent.stop,
    "killed": lambda first: first.stop(signal.SIGKILL),
    "cut": lambda first: first.wire.cut(),
}


ORDERS = [
    pytest.param(
        end,
        copied,
        marks=()
        if (end, copied) in {("cut", "credentials"), ("killed", "disk")}
        else pytest.mark.long,
    )
    for end in ENDS
    for copied in ("credentials", "disk")
]


@pytest.mark.parametrize(("end", "copied"), ORDERS)
async def test_a_second_agent_starts_nothing_in_any_state_of_the_first(
    tmp_path: Path, end: str, copied: str
) -> None:
    async with site(tmp_path) as made:
        first, uid = await first_with_a_vm(made)
        holder = await made.holder()
        second = made.agent(first.state if copied == "disk" else None)
        before = sorted(second.vms)
        ENDS[end](first)
        await second.start()
        await until(lambda: second.word == "refused", second.log())
        await asyncio.sleep(7)  # it asks again
        assert (await made.holder(), sorted(second.vms)) == (holder, before)
        assert "virtbus node takeover" in second.log()
        status = await made.ask("bus.status")
        assert any("second agent" in alarm for alarm in status["alarms"])
        shown = await made.ask("node.get", node=NODE)
        assert len(shown["node"]["rivals"]) == 1
        if end in {"stopped", "killed"}:
            await first.start()  # while the second asks: it takes its own key over at once
        first.wire.mend()
        await until(lambda: first.word == "held", first.log())
        await until(lambda: made.runs(uid), "the VM runs on")
        assert sorted(second.vms) == before


async def test_a_damaged_key_stops_no_running_agent_and_admits_no_second(tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        first, uid = await first_with_a_vm(made)
        holder = await made.holder()
        second = made.agent(first.state)
        await made.damage(subjects.node_instance(NODE), b"\xc1")
        await second.start()
        await until(lambda: second.word == "refused", second.log)
        first.wire.cut()  # it lists again, and proves the key first
        first.wire.mend()

        async def rewritten() -> bool:
            with suppress(VirtbusError):
                return await made.holder() == holder
            return False

        await until(rewritten, first.log)
        await made.ask("vm.stop", uid=uid)
        await until(lambda: made.state(uid, "Stopped"), "the VM is served")
        assert (first.word, second.word) == ("held", "refused")
        assert first.alive


async def given(made: Site) -> bool:
    """Return False until the first agent's goodbye has been read."""
    with suppress(VirtbusError):
        await made.ask("node.takeover", node=NODE, confirm="the host was scrapped")
        return True
    return False


async def test_a_person_gives_the_node_to_the_second_and_the_first_is_refused(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as made:
        first, uid = await first_with_a_vm(made)
        second = made.agent()
        await second.start()
        await until(lambda: second.word == "refused", second.log())

        async def refused() -> bool:
            try:
                await made.ask("node.takeover", node=NODE, confirm="the host was scrapped")
            except VirtbusError as error:
                return error.reason == "node_answers"
            return False

        await until(refused, "it is refused while the first is heard")
        first.stop()
        await until(lambda: given(made), "the node is given to the second")
        await until(lambda: second.word == "held", second.log())
        await until(lambda: second.vms == [uid], "the second acts on the VM")
        await first.start()
        await until(lambda: first.word == "refused", first.log())
        await until(lambda: made.runs(uid), "the VM runs on the second")
        second.stop(signal.SIGKILL)
        await second.start()
        await until(lambda: second.word == "held", second.log())
