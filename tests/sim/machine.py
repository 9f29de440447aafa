"""A simulated host: its disk, its hypervisor, its networks, and the losses of each death.

| dies | lost |
|---|---|
| a service | its memory, and unfinished work of its threads |
| libvirtd | connections; events; the reason why a domain is off. Guests continue |
| the host | all processes, every namespace and tap, everything that was not durable |
"""

import random
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from tests.sim.backup_hand import BackupDirectory, StagedFile, Stored
from tests.sim.loop import Process, VirtualLoop

from virtbus.nodeagent.core.metadata import parse
from virtbus.nodeagent.core.ports import (
    DomainChange,
    DomainEvent,
    DomainFacts,
    DomainMetadata,
    DomainState,
    Ending,
)
from virtbus.nodeagent.edge.ledger import LedgerEntry as LedgerEntry
from virtbus.schemas.backup import BackupCheck
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.vm import VmRecord

_FOLDER = re.compile(r"/volumes/([^/\"]+)/disk\.(?:qcow2|raw)")
_ALIAS = re.compile(r"<alias name=\"(ua-volume-[^\"]+)\"")
_METADATA = re.compile(r"<virtbus:vm\b.*?</virtbus:vm>", re.DOTALL)


@dataclass
class Temper:
    """The behaviour of a host, as probabilities and seconds; the nemesis sets it."""

    start_s: tuple[float, float] = (0.1, 0.6)
    start_fails: float = 0.0
    power_off_s: tuple[float, float] = (0.1, 2.0)
    deaf: float = 0.0
    """A guest that ignores ACPI."""
    events_lost: float = 0.0
    events_twice: float = 0.0
    call_s: tuple[float, float] = (0.0002, 0.004)
    io_s: tuple[float, float] = (0.0002, 0.004)
    part_s: tuple[float, float] = (0.005, 0.3)
    part_fails: float = 0.0


@dataclass(eq=False)
class Push:
    """A backup that a guest's QEMU writes. Its end is known only to a libvirtd that saw it."""

    file: StagedFile | None
    """None: its names are gone."""
    since: int
    at: int
    state: Literal["running", "done", "failed", "lost"] = "running"


@dataclass
class Domain:
    """One domain as libvirt has it."""

    uid: str
    metadata: DomainMetadata | None
    state: DomainState = DomainState.SHUT_OFF
    ending: Ending = Ending.UNKNOWN
    defined: bool = True
    run: int = 0
    """The number of the guest's run: a timer of an earlier one does nothing."""
    deaf: bool = False
    given: dict[str, str] = field(default_factory=dict)
    """The folders of volumes in its definition, by the id of the disk."""
    volumes: dict[str, str] = field(default_factory=dict)
    """The folders of the volumes that its guest has, in the same way."""
    push: Push | None = None

    @property
    def active(self) -> bool:
        return self.state is not DomainState.SHUT_OFF


@dataclass
class Disk:
    """The durable data."""

    records: dict[str, VmRecord] = field(default_factory=dict)
    ledger: dict[str, LedgerEntry] = field(default_factory=dict)
    """uid → highest epoch acted on, and True if the VM was removed."""
    commands: dict[str, Mapping[str, str]] = field(default_factory=dict)
    seeds: dict[str, str | None] = field(default_factory=dict)
    """uid → digest of the secrets in its seed."""
    overlays: dict[str, int] = field(default_factory=dict)
    """uid → epoch it was made for."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Folder of a volume → the VM whose disks were made last."""
    exports: dict[str, str] = field(default_factory=dict)
    """Operation → the uid of the VM whose disk was exported."""
    filled: dict[str, str] = field(default_factory=dict)
    """Folder of a volume → the operation that made its disk, until a VM uses it."""
    snapshots: dict[str, SnapshotWork] = field(default_factory=dict)
    """Folder of a snapshot → the work that made it."""
    uploads: set[str] = field(default_factory=set)
    """The names of uploaded files."""
    written: set[str] = field(default_factory=set)
    """Uids whose guest ran, so that their overlays contain its writes."""
    content: dict[str, int] = field(default_factory=dict)
    """uid → number of the content of its disks."""
    bitmaps: dict[str, dict[str, int]] = field(default_factory=dict)
    """uid → the usable bitmaps in its disks, each with the content since which it counts."""
    quarantine: dict[str, QuarantineRequest] = field(default_factory=dict)
    """Overlays without a record, by entry (ADR 0033)."""
    kept_seeds: dict[str, str | None] = field(default_factory=dict)
    groups: dict[str, tuple[str, NodeGroup]] = field(default_factory=dict)
    """netd's security groups: key → nonce of their bus, and the group."""
    nonce: str = ""
    key: str = ""
    """The host's identity; a copy of the disk has it, too."""
    lives: set[str] = field(default_factory=set)
    node_spec: NodeSpec | None = None
    nodes_own: dict[str, object] = field(default_factory=dict)

    def wrote(self, uid: str) -> int:
        """Return the number of the content after a guest may have written."""
        self.content[uid] = self.content.get(uid, 0) + 1
        return self.content[uid]

    def keep(self, uid: str, entry: str) -> None:
        """Move the agent's files of a VM to the quarantine's entry."""
        if uid in self.seeds:
            self.kept_seeds[entry] = self.seeds.pop(uid)
        self.records.pop(uid, None)
        self.commands.pop(uid, None)

    def bring_back(self, entry: str, uid: str) -> None:
        """Return the seeds of an entry to a VM."""
        if entry in self.kept_seeds:
            self.seeds[uid] = self.kept_seeds.pop(entry)


def copy_of(disk: Disk) -> Disk:
    """Copy the bytes to another disk."""
    held = {name: copy(value) for name, value in vars(disk).items()}
    return Disk(**held)


class Watcher:
    """The observer's callbacks; the real observer overrides them."""

    def started(self, host: "Host", domain: Domain) -> None: ...
    def defined(self, host: "Host", domain: Domain) -> None: ...
    def ended(self, host: "Host", domain: Domain, why: str) -> None: ...
    def pressed(self, host: "Host", domain: Domain) -> None: ...
    def stilled(self, host: "Host", domain: Domain) -> None: ...
    def disk_removed(self, host: "Host", uid: str) -> None: ...
    def volume_removed(self, host: "Host", folder: str) -> None: ...

    def volume_restored(self, host: "Host", folder: str) -> None: ...
    def volume_filled(self, host: "Host", folder: str) -> None: ...
    def volume_opened(self, host: "Host", domain: Domain, folder: str) -> None: ...
    def off(self, host: "Host", domain: Domain, why: str) -> None: ...
    def backup_copied(self, host: "Host", uid: str) -> None: ...
    def backup_stored(self, host: "Host", made: Stored) -> None: ...
    def backup_checked(self, host: "Host", backup: str, check: BackupCheck) -> None: ...
    def backup_removed(self, host: "Host", gone: Stored) -> None: ...
    def ruled(self, host: "Host", record: VmRecord, groups: Mapping[str, NodeGroup]) -> None: ...
    def wrong(self, invariant: str, what: str) -> None: ...
    def note(self, *what: object) -> None: ...


def volumes_in(xml: str) -> dict[str, str]:
    """Return the folders of volumes in the XML of a domain or disk, by the id of the disk."""
    found = {}
    for disk in xml.split("<disk ")[1:]:
        folder, alias = _FOLDER.search(disk), _ALIAS.search(disk)
        if folder is not None and alias is not None:
            found[alias[1]] = folder[1]
    return found


class Host:
    """One machine."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, name: str, watcher: Watcher, node: str = ""
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.name = name
        self.node = node or name
        """The node whose credentials it has; those of another host were copied."""
        self.watcher = watcher
        self.temper = Temper()
        self.agent_word = ""
        """The last message of its agent to its imaged and netd; lost with the host."""
        self.disk = Disk()
        self.backups = BackupDirectory()
        self.staged: dict[str, StagedFile] = {}
        """Backup → the file that QEMU writes, durable."""
        self.domains: dict[str, Domain] = {}
        self.networks: dict[str, tuple[int, str]] = {}
        """uid → epoch and address; lost with the host."""
        self.rules: dict[str, tuple[VmRecord, dict[str, NodeGroup]]] = {}
        """uid → the record and the groups whose rules its network has; lost with the host."""
        self.armed: dict[str, int] = {}
        self.up = True
        self.libvirt_up = True
        self.full = False
        """The disk is full: writes are refused, removals work."""
        self.listeners: list[tuple[Process, Callable[[DomainEvent], None]]] = []
        self.boot = 0
        self._addresses = 0

    @property
    def copied(self) -> bool:
        """It has the credentials of another host."""
        return self.name != self.node

    # --- libvirt --------------------------------------------------------------------------
    def later(self, span_s: tuple[float, float], work: Callable[[], None]) -> None:
        """Do it on the host after a delay, unless the host dies before."""
        boot = self.boot

        def now() -> None:
            if self.boot == boot and self.up:
                work()

        self.loop.outside(self.loop.time() + self.rng.uniform(*span_s), now)

    def facts(self, domain: Domain) -> DomainFacts:
        """Return the domain as the agent's edge reads it."""
        return DomainFacts(domain.uid, domain.state, domain.ending, domain.metadata)

    def define(self, xml: str) -> None:
        """As `virDomainDefineXML`."""
        found = _METADATA.search(xml)
        metadata = parse(found[0].replace("virtbus:", "")) if found else None
        if metadata is None:
            self.watcher.wrong("I15", f"{self.name}: a domain without metadata is defined")
            return
        if self.full:
            raise VirtbusError(Code.INTERNAL, "libvirt_failed", "define: no space left on device")
        domain = self.domains.get(metadata.uid)
        if domain is None:
            domain = self.domains[metadata.uid] = Domain(metadata.uid, metadata)
        domain.metadata, domain.defined = metadata, True
        domain.given = volumes_in(xml)
        self.watcher.defined(self, domain)

    def begin_start(
        self, uid: str, done: Callable[[VirtbusError | None], None], *, paused: bool
    ) -> None:
        """As `virDomainCreate`: STARTING now, then a guest or an error."""
        domain = self.domains.get(uid)
        if domain is None:
            done(VirtbusError(Code.NOT_FOUND, "no_domain", "start the guest: no such domain"))
        elif domain.state is DomainState.STARTING:
            done(VirtbusError(Code.UNAVAILABLE, "domain_busy", "start the guest: it is starting"))
        elif domain.active:
            done(None)
        else:
            domain.state, domain.run = DomainState.STARTING, domain.run + 1
            domain.volumes = dict(domain.given)
            self.watcher.started(self, domain)
            run = domain.run
            still = DomainState.PAUSED if paused else DomainState.RUNNING
            self.later(self.temper.start_s, lambda: self._started(domain, run, still, done))

    def _started(
        self,
        domain: Domain,
        run: int,
        state: DomainState,
        done: Callable[[VirtbusError | None], None],
    ) -> None:
        if domain.run != run or domain.state is not DomainState.STARTING:
            done(VirtbusError(Code.INTERNAL, "libvirt_failed", "start the guest: it was ended"))
            return
        if self.rng.random() < self.temper.start_fails:
            self._off(domain, Ending.UNKNOWN, DomainChange.ENDED, "a start failed")
            done(VirtbusError(Code.INTERNAL, "libvirt_failed", "start the guest: QEMU said no"))
            return
        domain.state = state
        self.disk.written.add(domain.uid)
        self.disk.wrote(domain.uid)
        domain.deaf = self.rng.random() < self.temper.deaf
        self.watcher.note(self.name, state, domain.uid)
        self.tell(DomainEvent(domain.uid, DomainChange.STARTED))
        if state is DomainState.PAUSED:
            self.tell(DomainEvent(domain.uid, DomainChange.PAUSED))
        done(None)

    def suspend(self, uid: str) -> None:
        """As `virDomainSuspend`."""
        self._still(uid, DomainState.RUNNING, DomainState.PAUSED, DomainChange.PAUSED)

    def resume(self, uid: str) -> None:
        """As `virDomainResume`."""
        self._still(uid, DomainState.PAUSED, DomainState.RUNNING, DomainChange.RESUMED)

    def press(self, uid: str, what: str) -> bool:
        """As `virDomainReset` and `virDomainReboot`."""
        domain = self.domains.get(uid)
        if domain is None or not domain.active:
            return False
        self.watcher.note(self.name, what, uid)
        self.watcher.pressed(self, domain)
        return True

    def _still(
        self, uid: str, before: DomainState, after: DomainState, change: DomainChange
    ) -> None:
        domain = self.domains.get(uid)
        if domain is not None and domain.state is before:
            domain.state = after
            self.watcher.note(self.name, change, uid)
            self.watcher.stilled(self, domain)
            self.tell(DomainEvent(uid, change))

    def shutdown(self, uid: str) -> bool:
        """As the ACPI button."""
        domain = self.domains.get(uid)
        if domain is None or not domain.active:
            return False
        if domain.state is DomainState.STARTING:
            raise VirtbusError(Code.UNAVAILABLE, "domain_busy", "power off: it is starting")
        self.watcher.ended(self, domain, "shutdown")
        if not domain.deaf:
            run = domain.run
            self.later(self.temper.power_off_s, lambda: self._power_off(domain, run))
        return True

    def _power_off(self, domain: Domain, run: int) -> None:
        if domain.run == run and domain.state is DomainState.RUNNING:
            self._off(domain, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN, "it powered off")

    def destroy(self, uid: str) -> None:
        """As `virDomainDestroy`; works on a domain that is starting, too."""
        domain = self.domains.get(uid)
        if domain is not None and domain.active:
            self.watcher.ended(self, domain, "destroy")
            self._off(domain, Ending.ENDED, DomainChange.ENDED, "destroyed")

    def undefine(self, uid: str) -> None:
        """As `virDomainUndefineFlags`: a running one continues, transient."""
        domain = self.domains.get(uid)
        if domain is None:
            return
        domain.defined = False
        if domain.active:
            self.watcher.wrong("I5", f"{self.name}: {uid} is undefined while its guest runs")
        else:
            del self.domains[uid]

    def crash_guest(self, uid: str) -> None:
        """QEMU dies by itself. During a start, libvirt reports only that the start has failed."""
        domain = self.domains[uid]
        if domain.state is DomainState.STARTING:
            self._off(domain, Ending.UNKNOWN, DomainChange.ENDED, "a start failed")
        else:
            self._off(domain, Ending.CRASHED, DomainChange.CRASHED, "crashed")

    def halt_guest(self, uid: str) -> None:
        """The guest powers itself off."""
        self._power_off(self.domains[uid], self.domains[uid].run)

    def _off(self, domain: Domain, ending: Ending, change: DomainChange, why: str) -> None:
        self.watcher.off(self, domain, why)
        domain.state, domain.ending = DomainState.SHUT_OFF, ending
        domain.run += 1
        domain.push = None
        if ending is Ending.CRASHED:
            self.disk.bitmaps.pop(domain.uid, None)
        if not domain.defined:
            self.domains.pop(domain.uid, None)
        self.tell(DomainEvent(domain.uid, change))

    def tell(self, event: DomainEvent) -> None:
        """Send an event to every listening agent: soon, or never, or twice."""
        if not self.libvirt_up:
            return
        for process, hear in self.listeners:
            copies = 1 + (self.rng.random() < self.temper.events_twice)
            if self.rng.random() < self.temper.events_lost:
                copies = 0
            for _ in range(copies):
                at_s = self.loop.time() + self.rng.uniform(0.0, 0.03)
                self.loop.call_at(at_s, hear, event, context=process.context)

    def restart_libvirt(self, for_s: float) -> None:
        """Kill and restart libvirtd; guests continue."""
        if not self.libvirt_up or not self.up:
            return
        self.libvirt_up = False
        for domain in self.domains.values():
            if not domain.active:
                domain.ending = Ending.UNKNOWN
            if domain.push is not None and domain.push.state != "running":
                domain.push.state = "lost"
        self.later((for_s, for_s), self._libvirt_back)

    def _libvirt_back(self) -> None:
        self.libvirt_up = True
        self.tell(DomainEvent("", None))

    def pushed(self, domain: Domain, push: Push) -> None:
        """QEMU has written its part of a backup."""
        if domain.push is not push:
            return
        push.state = "lost"
        if self.libvirt_up:
            push.state = "failed" if self.full else "done"
        if push.file is not None and not self.full:
            push.file.written = push.since, push.at

    # --- networks -------------------------------------------------------------------------
    def address(self) -> str:
        """Return a free address of a small pool."""
        used = {address for _, address in self.networks.values()}
        while True:
            self._addresses = self._addresses % 40 + 1
            address = f"10.64.0.{self._addresses + 1}"
            if address not in used:
                return address

    # --- disk ----------------------------------------------------------------------------
    def free(self) -> None:
        """Free the disk."""
        self.full = False

    # --- power ----------------------------------------------------------------------------
    def power_off(self) -> None:
        """Kill the host: QEMU, namespaces and all processes with it."""
        self.up, self.libvirt_up = False, False
        self.boot += 1
        self.agent_word = ""
        for domain in list(self.domains.values()):
            if domain.active:
                self.watcher.off(self, domain, "power")
                domain.state, domain.ending = DomainState.SHUT_OFF, Ending.UNKNOWN
                domain.run += 1
                domain.push = None
                self.disk.bitmaps.pop(domain.uid, None)
            domain.ending = Ending.UNKNOWN
            if not domain.defined:
                del self.domains[domain.uid]
        self.networks.clear()
        self.rules.clear()
        self.armed.clear()
        self.listeners.clear()

    def power_on(self) -> None:
        self.up = self.libvirt_up = True
