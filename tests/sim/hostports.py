"""The agent's ports over a simulated host.

The product's threads continue after their task is cancelled, and end only with the process. They
do so here as well.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tests.sim.loop import Process
from tests.sim.machine import Domain, Host
from tests.sim.wire import Gone

from virtbus.bus.client.mailbox import Mailbox
from virtbus.nodeagent.core.disks import DriveState
from virtbus.nodeagent.core.instance import Me
from virtbus.nodeagent.core.ports import (
    NO_FILES,
    ConsoleViewer,
    DomainEvent,
    DomainFacts,
    HostFacts,
)
from virtbus.nodeagent.core.resource_values import ResourcesSet
from virtbus.nodeagent.edge.ledger import LedgerEntry as LedgerEntry
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.hosts import HostMarks
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.node_rpc import Arm
from virtbus.schemas.resources import Resources, ResourcesInForce
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import encode

Result = TypeVar("Result")
GIB = 1024**3
LIBVIRT_TIMEOUT_S = 30.0


class Threads:
    """Blocking work of one process."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host = host
        self.process = process

    def alive(self) -> None:
        if self.host.loop.over or not self.process.alive:
            raise Gone

    async def on_disk(self, work: Callable[[], Result], *, full: str = "") -> Result:
        """Like the product's `in_thread`: a cancelled caller waits for the thread's end.

        `full`: the reason for which a write is refused while the host's disk is full.
        """

        def done() -> Result:
            if full and self.host.full:
                message = "no space left on device; free space there"
                raise VirtbusError(Code.UNAVAILABLE, full, message)
            return work()

        return await self.run(done, self.host.temper.io_s, through=True)

    async def on_guest(self, uid: str, work: Callable[[Domain], Result]) -> Result | None:
        """Do `work` as a call of libvirt; return None for a guest that is not active."""

        def call() -> Result | None:
            if not self.host.libvirt_up:
                message = "libvirt does not answer; start libvirtd, guests run on meanwhile"
                raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", message, after_ms=1000)
            domain = self.host.domains.get(uid)
            return work(domain) if domain is not None and domain.active else None

        return await self.run(call, self.host.temper.call_s)

    async def run(
        self, work: Callable[[], Result], span_s: tuple[float, float], *, through: bool = False
    ) -> Result:
        """Return the result of `work`, done on the host later; `through`: even if cancelled."""
        self.alive()
        done: asyncio.Future[Result] = self.host.loop.create_future()

        def now() -> None:
            try:
                result = work()
            except VirtbusError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        at_s = self.host.loop.time() + self.host.rng.uniform(*span_s)
        self.host.loop.call_at(at_s, now, context=self.process.context)
        if through:
            await _through(done)
        result = await done
        self.alive()
        return result


async def _through(done: "asyncio.Future[Result]") -> None:
    """Wait for the thread; deliver a cancellation once it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait({done})
        except asyncio.CancelledError as error:
            cancelled = error
            if isinstance(error, Gone) or done.get_loop().over:  # type: ignore[attr-defined]  # ours
                break
    if cancelled is not None:
        if done.done() and not done.cancelled():
            done.exception()  # retrieved: the caller sees the cancellation
        raise cancelled


class SimDevices:
    """Implements `LiveDevices`. The simulated netd plugs NICs by itself, so nothing is called."""

    def __init__(self, call: Callable[[Callable[[], None]], Awaitable[None]], host: Host) -> None:
        self._call = call
        self._host = host

    async def live_xml(self, uid: str) -> str | None:
        await self._call(lambda: None)
        domain = self._host.domains.get(uid)
        return "<domain/>" if domain is not None and self._host.facts(domain).active else None

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        raise NotImplementedError

    async def detach(self, uid: str, alias: str) -> None:
        raise NotImplementedError

    async def detach_unknown(self, uid: str, number: int) -> None:
        raise NotImplementedError

    async def has_unknown(self, uid: str, number: int) -> bool:
        raise NotImplementedError


class SimHypervisor:
    """Implements `Hypervisor`."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._threads = Threads(host, process)
        self.healthy = True
        self.devices = SimDevices(self._call, host)

    async def _call(self, work: Callable[[], Result]) -> Result:
        def asked() -> Result:
            self._libvirt()
            return work()

        return await self._threads.run(asked, self._host.temper.call_s)

    def _libvirt(self) -> None:
        if not self._host.libvirt_up:
            message = "libvirt does not answer; start libvirtd, guests keep running meanwhile"
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", message, after_ms=1000)

    async def list_domains(self) -> list[DomainFacts]:
        host = self._host
        return await self._call(lambda: [host.facts(d) for d in host.domains.values()])

    async def facts(self, uid: str) -> DomainFacts | None:
        def read() -> DomainFacts | None:
            domain = self._host.domains.get(uid)
            return None if domain is None else self._host.facts(domain)

        return await self._call(read)

    async def define(self, xml: str) -> None:
        await self._call(lambda: self._host.define(xml))

    async def start(
        self, uid: str, *, paused: bool = False, files: Mapping[str, int] = NO_FILES
    ) -> None:
        host, loop = self._host, self._host.loop
        ended: asyncio.Future[VirtbusError | None] = loop.create_future()

        def done(error: VirtbusError | None) -> None:
            if not ended.done():
                ended.set_result(error)

        def begin() -> None:
            if uid not in host.armed:
                message = "vmwrapper: not_armed: netd does not know of this start"
                done(VirtbusError(Code.UNAVAILABLE, "not_armed", message))
            else:
                del host.armed[uid]
                host.begin_start(uid, done, paused=paused)

        await self._call(begin)
        try:
            async with asyncio.timeout(LIBVIRT_TIMEOUT_S):
                error = await ended
        except TimeoutError:
            message = "start the guest: libvirt did not answer in time"
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_late", message) from None
        self._threads.alive()
        if error is not None:
            raise error

    def start_under_way(self, uid: str) -> bool:
        """A simulated libvirt shows each start in the domain's state at once."""
        del uid
        return False

    async def shutdown(self, uid: str) -> bool:
        return await self._call(lambda: self._host.shutdown(uid))

    async def set_drives(self, uid: str, wanted: Mapping[str, DriveState]) -> None:
        await self._call(lambda: None)

    async def set_resources(self, uid: str, wanted: Resources) -> ResourcesSet:
        del uid
        return await self._call(lambda: ResourcesSet(ResourcesInForce(**wanted.model_dump())))

    async def limit(
        self, uid: str, wanted: Mapping[str, Mapping[str, int]]
    ) -> Mapping[str, Mapping[str, int]]:
        return await self._call(lambda: wanted if uid in self._host.domains else {})

    async def destroy(self, uid: str, *, forced: bool = False) -> None:
        await self._call(lambda: self._host.destroy(uid))

    async def suspend(self, uid: str) -> None:
        await self._call(lambda: self._host.suspend(uid))

    async def resume(self, uid: str) -> None:
        await self._call(lambda: self._host.resume(uid))

    async def reset(self, uid: str) -> bool:
        return await self._call(lambda: self._host.press(uid, "reset"))

    async def reboot(self, uid: str) -> bool:
        return await self._call(lambda: self._host.press(uid, "reboot"))

    async def uses(self, uid: str, folder: Path) -> bool:
        """A simulated host has no other instance."""
        del uid, folder
        return True

    async def set_link(self, uid: str, device: str, *, up: bool) -> None:
        await self._call(lambda: None)

    async def undefine(self, uid: str) -> None:
        await self._call(lambda: self._host.undefine(uid))

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[DomainEvent]]:
        self._threads.alive()
        heard: Mailbox[DomainEvent] = Mailbox(1000)
        listener = (self._threads.process, heard.put)
        self._host.listeners.append(listener)
        try:
            yield heard
        finally:
            if listener in self._host.listeners:
                self._host.listeners.remove(listener)


class SimFiles:
    """Implements `RecordFiles`: changes are durable once `write` and `forget` have returned."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._disk = host.disk
        self._threads = Threads(host, process)
        self._ledger = dict(host.disk.ledger)

    async def write(self, record: VmRecord) -> None:
        epoch = max(self.epoch(record.uid), record.epoch)
        self._ledger[record.uid] = LedgerEntry(epoch)

        def save() -> None:
            self._save(record.uid)
            self._disk.records[record.uid] = record

        await self._threads.on_disk(save, full="state_write")

    async def list(self) -> dict[str, VmRecord]:
        return await self._threads.on_disk(lambda: dict(sorted(self._disk.records.items())))

    async def things(self) -> Mapping[str, tuple[str, ...]]:
        kept = (("record", self._disk.records), ("seed", self._disk.seeds))
        return await self._threads.on_disk(
            lambda: {
                uid: tuple(what for what, held in kept if uid in held)
                for uid in sorted({*self._disk.records, *self._disk.seeds})
            }
        )

    async def commands(self, uid: str) -> Mapping[str, str]:
        return await self._threads.on_disk(lambda: self._disk.commands.get(uid, {}))

    async def keep_commands(self, uid: str, told: Mapping[str, str]) -> None:
        def keep() -> None:
            if uid in self._disk.records:
                self._disk.commands[uid] = told

        await self._threads.on_disk(keep, full="state_write")

    async def remove_work(self, uid: str) -> None:
        await self._threads.on_disk(lambda: self._disk.seeds.pop(uid, None))

    async def keep_work(self, uid: str, entry: str) -> None:
        await self._threads.on_disk(lambda: self._disk.keep(uid, entry), full="state_write")

    async def bring_back(self, entry: str, uid: str) -> None:
        await self._threads.on_disk(lambda: self._disk.bring_back(entry, uid), full="state_write")

    async def purge_kept(self, entry: str) -> None:
        await self._threads.on_disk(lambda: self._disk.kept_seeds.pop(entry, None))

    async def forget(self, uid: str, *, refused_epoch: int = 0) -> None:
        epoch = max(self.epoch(uid), refused_epoch)
        self._ledger[uid] = LedgerEntry(epoch, removed_s=1, refused=bool(refused_epoch))

        def remove() -> None:
            self._disk.records.pop(uid, None)
            self._disk.commands.pop(uid, None)
            self._disk.seeds.pop(uid, None)

        await self._threads.on_disk(remove)
        await self._threads.on_disk(lambda: self._save(uid), full="state_write")

    def _save(self, uid: str) -> None:
        self._disk.ledger[uid] = self._ledger[uid]

    def epoch(self, uid: str) -> int:
        return self._ledger.get(uid, LedgerEntry(0)).epoch

    def left(self, uid: str) -> int:
        entry = self._ledger.get(uid, LedgerEntry(0))
        return entry.epoch if entry.removed_s and not entry.refused else 0

    def refused(self, uid: str) -> int:
        entry = self._ledger.get(uid, LedgerEntry(0))
        return entry.epoch if entry.refused else 0

    def removed(self) -> dict[str, int]:
        return {uid: left for uid in self._ledger if (left := self.left(uid))}

    def seen(self, time_ns: int) -> None:
        """No run lasts a day."""

    def nonce(self) -> str:
        return self._disk.nonce

    def set_nonce(self, nonce: str) -> None:
        self._threads.alive()
        self._disk.nonce = nonce

    def node_spec(self) -> NodeSpec | None:
        return self._disk.node_spec

    def set_node_spec(self, node_spec: NodeSpec | None) -> None:
        self._threads.alive()
        if not self._host.full:  # otherwise it is logged, and kept after the next list
            self._disk.node_spec = node_spec

    async def new_boot(self, uid: str) -> None:
        del uid
        self._threads.alive()

    def console_socket(self, uid: str) -> Path:
        return Path("/run/virtbus/vms") / uid / "console.sock"

    def console_log(self, uid: str) -> Path:
        return Path("/var/lib/virtbus/consoles") / f"{uid}.log"


class SimLives:
    """Implements `Lives`, and writes the run folder's file for the host's services."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._threads = Threads(host, process)

    def me(self, uuid: Callable[[], str]) -> Me:
        """Start a new instance of this host's agent; two machines have no hardware in common."""
        disk = self._host.disk
        disk.key = disk.key or uuid()
        marks = HostMarks(key=disk.key, machine="copied with the disk", hardware=self._host.name)
        boot = f"{self._host.name} {self._host.boot}"
        return Me(uuid(), marks, boot, self._host.name, frozenset(disk.lives))

    def remember(self, instance: str) -> None:
        self._threads.alive()
        self._host.disk.lives.add(instance)

    def disown(self) -> None:
        self._host.disk.lives.clear()

    def tell(self, instance: str, why: str) -> None:
        del why
        self._threads.alive()
        self._host.agent_word = f"held {instance}" if instance else "refused"


class SimSeeds:
    """Implements `Seeds`."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._threads = Threads(host, process)

    def paths(self, record: VmRecord) -> Mapping[str, Path]:
        folder = Path("/var/lib/virtbus/vms") / record.uid
        return {
            volume.name: folder / f"seed-{volume.name}.iso"
            for volume in record.spec.volumes
            if volume.is_iso
        }

    def ignition_path(self, record: VmRecord) -> Path | None:
        return Path("/simulated") / record.uid / "ignition" if record.spec.ignition else None

    def stand(self, record: VmRecord) -> bool:
        return record.uid in self._host.disk.seeds

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None:
        del interfaces
        held = None if secrets is None else encode(secrets).hex()[:40]

        def save() -> None:
            self._host.disk.seeds[record.uid] = held

        await self._threads.on_disk(save, full="state_write")


class SimAdmin:
    """Implements `NetdAdmin` and `Readiness`; `netd` says whether netd serves."""

    def __init__(self, host: Host, process: Process, netd: Callable[[], bool]) -> None:
        self._host = host
        self._threads = Threads(host, process)
        self._netd = netd

    async def arm(self, arm: Arm) -> None:
        def ask() -> None:
            if not self._netd():
                message = "netd does not answer on admin.sock; see `virtbus status`"
                raise VirtbusError(Code.UNAVAILABLE, "netd_down", message, after_ms=1000)
            if arm.uid not in self._host.networks:
                message = "netd has no network of this VM"
                raise VirtbusError(Code.UNAVAILABLE, "not_attached", message)
            self._host.armed[arm.uid] = arm.epoch

        await self._threads.run(ask, self._host.temper.call_s)

    async def answers(
        self,
        uid: str,
        interfaces: Callable[[], Sequence[InterfaceStatus]],
        *,
        rebooted: bool = False,
    ) -> str:
        del uid, interfaces, rebooted
        await asyncio.sleep(self._host.rng.uniform(0.3, 2.0))
        return "AddressAnswers"


class NoConsole:
    """Implements `Console`; nobody attaches here."""

    def attach(
        self, uid: str, *, write: bool, tail_bytes: int, owner: str
    ) -> AbstractAsyncContextManager[ConsoleViewer]:
        raise VirtbusError(Code.CONFLICT, "not_running", f"{uid} {write} {tail_bytes} {owner}")

    def read_log(self, uid: str, *, tail_bytes: int, follow: bool) -> AsyncIterator[bytes]:
        raise VirtbusError(Code.NOT_FOUND, "no_log", f"{uid} {tail_bytes} {follow}")


def host_facts(host: Host) -> HostFacts:
    """A host with room for every VM of a seed on two nodes."""
    return HostFacts(
        hostname=host.name,
        cpus=8,
        memory_bytes=8 * GIB,
        disk_free_bytes=100 * GIB,
        disk_reserve_bytes=10 * GIB,
        max_vcpus=64,
        accelerators=("tcg",),
        versions={},
    )
