"""A node without a host: the real agent on the memory bus, with a dict as hypervisor."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from services.nodeagent.tests.pretended_devices import Devices

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.nodeagent.agent_ports import AgentEvents, AgentPorts
from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.disks import DriveState
from virtbus.nodeagent.core.lost_guests import guest_lost
from virtbus.nodeagent.core.metadata import parse
from virtbus.nodeagent.core.plugs import GuestDevices
from virtbus.nodeagent.core.ports import (
    NO_FILES,
    DomainChange,
    DomainEvent,
    DomainFacts,
    DomainState,
    Ending,
    HostFacts,
)
from virtbus.nodeagent.core.resource_values import ResourcesSet
from virtbus.nodeagent.core.shares import NoShares, SharedDirectories
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.freeze_files import DiskFreezes
from virtbus.nodeagent.edge.freezing import GuestFreezes
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.nodeagent.edge.seed_iso import SeedIsos
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.service import NodeAgent
from virtbus.nodeagent.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestQuestion
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.operation import OperationRecord, OperationStatus
from virtbus.schemas.resources import Resources, ResourcesInForce
from virtbus.schemas.vm import JoinNonce, VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import encode, read
from virtbus.simulator.memory_files import NoDisks
from virtbus.simulator.services import SimulatedNode

NODE = "n1"
HOST = HostFacts("n1", 4, 8 << 30, 100 << 30, 2 << 30, 8, ("tcg",), {})


def uid(number: int) -> str:
    return f"0192f0c1-2d3e-7abc-8def-{number:012x}"


def record(number: int = 1, **more: Any) -> VmRecord:
    """A VM with one interface and no disk."""
    spec = {
        "domain": {"devices": {"interfaces": [{"name": "net0"}]}},
        "networks": [{"name": "net0"}],
        "termination_grace_s": 0,
        **more.pop("spec", {}),
    }
    values = {
        "uid": uid(number),
        "namespace": "default",
        "name": f"vm-{number}",
        "spec": spec,
        "spec_hash": "",
        "node": NODE,
        "created_ns": 0,
    }
    return VmRecord.model_validate(values | more)


class Domains:
    """The `Hypervisor` port as a dict: uid to state, and its calls, in order."""

    healthy = True

    def __init__(self) -> None:
        self.there: dict[str, DomainFacts] = {}
        self.done: list[tuple[str, str]] = []
        self.foreign: set[str] = set()
        self.locked: set[str] = set()
        self.media: dict[str, dict[str, str]] = {}
        self.limits: dict[str, dict[str, Mapping[str, int]]] = {}
        self.kept = 0
        """The memory that guests keep, because their balloons have no driver yet."""
        self.errors: dict[str, VirtbusError] = {}
        """The error of a call, by its name."""
        self.late: set[str] = set()
        """Guests with a start that libvirt has not ended."""
        self.links_fail = False
        self.devices = Devices(self.there, self.done)
        self.plugs = Plugs(self)
        self._events: list[asyncio.Queue[DomainEvent]] = []

    def set(self, of: str, state: DomainState, ending: Ending = Ending.UNKNOWN) -> None:
        known = self.there.get(of)
        self.there[of] = DomainFacts(of, state, ending, known.metadata if known else None)

    def lose(self, of: str, pid: int = 4711) -> None:
        """libvirt loses a guest that runs on; it is noticed by the next comparison."""
        self.there[of] = DomainFacts(of, DomainState.LOST, pid=pid)
        self.tell(DomainEvent("", None))

    def tell(self, event: DomainEvent) -> None:
        for queue in self._events:
            queue.put_nowait(event)

    def end(self, of: str, ending: Ending, change: DomainChange) -> None:
        """The guest ends by itself."""
        self.set(of, DomainState.SHUT_OFF, ending)
        self.tell(DomainEvent(of, change))

    async def uses(self, of: str, folder: Path) -> bool:
        del folder
        return of not in self.foreign

    async def list_domains(self) -> list[DomainFacts]:
        return list(self.there.values())

    async def facts(self, of: str) -> DomainFacts | None:
        return self.there.get(of)

    async def define(self, xml: str) -> None:
        domain = ET.fromstring(xml)
        of = str(domain.findtext("uuid"))
        known = self.there.get(of, DomainFacts(of, DomainState.SHUT_OFF))
        ours = ET.tostring(domain.findall("metadata/*")[0], encoding="unicode")
        self.devices.defined[of] = domain
        self.there[of] = replace(known, metadata=parse(ours))
        self.plugs.defined(of, domain)

    async def start(
        self, of: str, *, paused: bool = False, files: Mapping[str, int] = NO_FILES
    ) -> None:
        self.done.append(("start", of))
        if (error := self.errors.get("start")) is not None:
            raise error
        self.devices.started(of)
        self.set(of, DomainState.PAUSED if paused else DomainState.RUNNING)
        if paused:
            self.tell(DomainEvent(of, DomainChange.STARTED))
            self.tell(DomainEvent(of, DomainChange.PAUSED))

    def start_under_way(self, of: str) -> bool:
        return of in self.late

    async def shutdown(self, of: str) -> bool:
        self.done.append(("shutdown", of))
        if self.there[of].pid:
            raise guest_lost(self.there[of].pid)
        return self.there[of].active

    async def set_drives(self, of: str, wanted: Mapping[str, DriveState]) -> None:
        self.done.append(("drives", of))
        locked = [name for name, drive in wanted.items() if name in self.locked and not drive.force]
        if locked and not wanted[locked[0]].path:
            raise VirtbusError(Code.CONFLICT, "tray_locked", f"the guest locks {locked[0]}")
        self.media[of] = {name: drive.path for name, drive in wanted.items()}

    async def set_resources(self, of: str, wanted: Resources) -> ResourcesSet:
        self.done.append(("resources", of))
        if (error := self.errors.get("resources")) is not None and error.code != Code.UNSUPPORTED:
            raise error
        told = wanted.model_dump() | ({"memory_bytes": self.kept} if self.kept else {})
        if error is not None:  # of the CPU shares; the other limits are set
            told["cpu_shares"] = None
        return ResourcesSet(ResourcesInForce(**told), error)

    async def limit(
        self, of: str, wanted: Mapping[str, Mapping[str, int]]
    ) -> Mapping[str, Mapping[str, int]]:
        self.done.append(("limit", of))
        limits = self.limits.setdefault(of, {})
        if (error := self.errors.get("limit")) is not None:
            raise error
        limits.update(wanted)
        return limits

    async def destroy(self, of: str, *, forced: bool = False) -> None:
        facts = self.there.get(of)
        if facts is not None and facts.pid and not forced:
            raise guest_lost(facts.pid)
        if facts is not None and facts.active:
            self.done.append(("destroy", of))
            self.set(of, DomainState.SHUT_OFF, Ending.ENDED)

    async def suspend(self, of: str) -> None:
        self.done.append(("suspend", of))
        if self.there[of].state is DomainState.RUNNING:
            self.set(of, DomainState.PAUSED)
            self.tell(DomainEvent(of, DomainChange.PAUSED))

    async def resume(self, of: str) -> None:
        self.done.append(("resume", of))
        if self.there[of].state is DomainState.PAUSED:
            self.set(of, DomainState.RUNNING)
            self.tell(DomainEvent(of, DomainChange.RESUMED))

    async def reset(self, of: str) -> bool:
        return self._pressed("reset", of)

    async def reboot(self, of: str) -> bool:
        return self._pressed("reboot", of)

    def _pressed(self, what: str, of: str) -> bool:
        self.done.append((what, of))
        return of in self.there and self.there[of].active

    async def set_link(self, of: str, device: str, *, up: bool) -> None:
        if self.links_fail:
            raise VirtbusError(Code.INTERNAL, "qemu_refused", "QEMU refused the link")
        self.done.append((f"link {device} {'up' if up else 'down'}", of))

    async def undefine(self, of: str) -> None:
        self.there.pop(of, None)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[DomainEvent]]:
        queue: asyncio.Queue[DomainEvent] = asyncio.Queue()
        self._events.append(queue)

        async def told() -> AsyncIterator[DomainEvent]:
            while True:
                yield await queue.get()

        yield told()
        self._events.remove(queue)


class Plugs:
    """The `DiskPlugs` port: the volumes in each guest by id, and the calls."""

    def __init__(self, domains: "Domains") -> None:
        self._domains = domains
        self.there: dict[str, dict[str, str]] = {}
        """By uid and id: the element of a disk."""
        self.done: list[str] = []
        self.busy: set[str] = set()
        """Ids of disks that the guest does not release."""
        self.kept = 0
        """The memory that guests keep, because their balloons have no driver yet."""
        self.errors: dict[str, VirtbusError] = {}
        """The error of a call, by its name."""

    async def devices(self, of: str) -> GuestDevices | None:
        facts = self._domains.there.get(of)
        if facts is None or not facts.active:
            return None
        return GuestDevices(frozenset(self.there.get(of, {})), root_ports=32)

    async def note(self, of: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        self._called("note")
        facts = self._domains.there[of]
        assert facts.metadata is not None
        known = replace(facts.metadata, addresses=addresses, disks=disks)
        self._domains.there[of] = replace(facts, metadata=known)

    async def attach(self, of: str, devices: Sequence[str]) -> None:
        self._called("attach")
        alias = ET.fromstring(devices[-1]).find("alias")
        assert alias is not None
        self.there.setdefault(of, {})[alias.get("name", "")] = devices[-1]

    async def detach(self, of: str, alias: str) -> None:
        self._called("detach")
        if alias not in self.busy:
            self.there[of].pop(alias, None)

    async def close_left(self, uid: str) -> None:
        """Do nothing: these guests leave no file open."""

    async def grow(self, of: str, sizes: Mapping[str, int]) -> None:
        self._called(f"grow {of} {dict(sizes)}")

    def defined(self, of: str, domain: ET.Element) -> None:
        """A start opens the disks of the definition."""
        disks = {
            alias.get("name", ""): ET.tostring(disk, encoding="unicode")
            for disk in domain.findall("devices/disk")
            if (alias := disk.find("alias")) is not None
        }
        self.there[of] = disks

    def _called(self, call: str) -> None:
        self.done.append(call)
        if (error := self.errors.get(call)) is not None:
            raise error


class Insides:
    """The `GuestAgents` port: the guests with frozen file systems, and the calls."""

    def __init__(self) -> None:
        self.frozen: set[str] = set()
        self.done: list[str] = []
        self.kept = 0
        """The memory that guests keep, because their balloons have no driver yet."""
        self.errors: dict[str, VirtbusError] = {}
        """The error of a call, by its verb."""

    async def ask(
        self, of: str, about: Sequence[GuestQuestion], *, timeout_s: float
    ) -> Mapping[str, object]:
        raise NotImplementedError

    async def freeze(self, of: str, *, timeout_s: float) -> bool:
        self._called("freeze")
        if of in self.frozen:
            raise VirtbusError(Code.CONFLICT, "guest_frozen", "frozen already")
        self.frozen.add(of)
        return True

    async def thaw(self, of: str, *, timeout_s: float) -> bool:
        self._called("thaw")
        self.frozen.discard(of)
        return True

    def _called(self, verb: str) -> None:
        self.done.append(verb)
        if verb in self.errors:
            raise self.errors[verb]


class Node:
    """One host whose agent stops and restarts; bus, domains and disk stay."""

    services: Callable[[MemoryBus, str], SimulatedNode] = SimulatedNode
    """Makes the services of each agent's node."""

    def __init__(self, tmp: Path, **settings: Any) -> None:
        self.tmp = tmp
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server, "test")
        self.domains = Domains()
        self.insides = Insides()
        self.shares: SharedDirectories = NoShares()
        self.settings = Settings(
            node=NODE,
            state_dir=tmp / "state",
            run_dir=tmp / "run",
            ask_after_s=0.001,
            heartbeat_s=0.05,
            **settings,
        )
        self.files: AgentFiles
        self.simulated: SimulatedNode

    async def join(self, nonce: str = "bus-1") -> None:
        await self.bus.put(subjects.join_nonce(NODE), encode(JoinNonce(nonce=nonce)))

    async def other_bus(self, nonce: str = "bus-2") -> None:
        """The bus is lost, and another, empty one replaces it."""
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server, "test")
        await self.join(nonce)

    @asynccontextmanager
    async def agent(self, bus: MemoryBus | None = None) -> AsyncIterator[NodeAgent]:
        """Run the agent's process while the context is open; on a connection of its own."""
        bus = bus or MemoryBus(self.server, "agent")
        self.files = AgentFiles(self.settings.state_dir, self.settings.run_dir)
        self.files.open(NODE)
        self.simulated = simulated = self.services(bus, NODE)
        self.freezes = freezes = GuestFreezes(self.insides, DiskFreezes(self.files.vms))
        tools = AgentPorts(
            bus=bus,
            settings=self.settings,
            hypervisor=self.domains,
            files=self.files,
            seeds=SeedIsos(self.files.vms),
            disks=NoDisks(),
            netd=simulated,
            reach=simulated,
            events=AgentEvents(bus, NODE),
            accelerator=lambda _record: "tcg",
            freezes=freezes,
            plugs=self.domains.plugs,
            shares=self.shares,
        )
        consoles = Consoles(self.files.console_socket, self.files.console_log)
        agent = NodeAgent(
            tools,
            Heartbeat(bus, self.settings, lambda: HOST),
            AgentRpc(bus, NODE, consoles),
        )
        try:
            async with freezes.keeping(), simulated.serve(), asyncio.TaskGroup() as group:
                task = group.create_task(agent.run())
                yield agent
                task.cancel()
        finally:
            self.files.close()

    # --- state on the bus -----------------------------------------------------------------
    async def put(self, wanted: VmRecord) -> None:
        await self.bus.put(subjects.vm_record(wanted.node, wanted.uid), encode(wanted))

    async def export(self, vm: VmRecord) -> str:
        """Put an export of a VM on the bus; return the key of the record."""
        fields = {"id": uid(10), "kind": "export", "node": NODE, "resource": "vm", "created_ns": 1}
        fields |= vm.model_dump(include={"namespace", "uid", "name", "epoch"})
        key = subjects.operation_record(NODE, uid(10))
        await self.bus.put(key, encode(OperationRecord.model_validate(fields)))
        return key

    async def export_phase(self) -> str:
        """Return the phase of that export; empty if it has none yet."""
        entry = await self.bus.get(subjects.operation_status(NODE, uid(10)))
        return str(read(OperationStatus, entry.value).phase) if entry is not None else ""

    async def start_another(self) -> None:
        """Return once a new VM was started: all earlier events have been handled."""
        await self.put(record(99))
        await eventually(lambda: ("start", uid(99)) in self.domains.done)

    async def status(self, of: str) -> VmStatus | None:
        entry = await self.bus.get(subjects.vm_status(NODE, of))
        if entry is None or entry.kind is EntryKind.PURGE:
            return None
        return read(VmStatus, entry.value)

    async def state(self, of: str) -> str:
        found = await self.status(of)
        return str(found.state) if found is not None else ""

    async def liveness(self) -> NodeRecord | None:
        entry = await self.bus.get(subjects.node_record(NODE))
        return read(NodeRecord, entry.value) if entry is not None and entry.value else None


def in_state(node: Node, state: str, of: str = uid(1)) -> Callable[[], Awaitable[bool]]:
    """A condition for `eventually`: the status of `of` shows `state`."""

    async def check() -> bool:
        return await node.state(of) == state

    return check


async def eventually(check: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    """Return the first true value of `check`, which may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = check()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.005)
