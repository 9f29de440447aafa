"""Observes every write and every guest from outside, and names the violated invariant.

The invariants (docs/reference/invariants.md) are checked at each write to the bus and each step
of a guest. `at_rest` checks those that must hold once all faults are healed.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.sim.addresses import AddressObserver
from tests.sim.backup_hand import Stored
from tests.sim.backups import BackupObserver
from tests.sim.groups import GroupObserver
from tests.sim.image_names import ImageNameObserver
from tests.sim.loop import VirtualLoop
from tests.sim.machine import Domain, Host, Watcher
from tests.sim.networks import NetworkObserver
from tests.sim.operations import OperationObserver
from tests.sim.snapshots import SnapshotObserver
from tests.sim.volumes import VolumeObserver
from tests.sim.wire import SimServer

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.vm_keys import read_vm_key
from virtbus.nodeagent.core.ports import DomainState
from virtbus.nodeagent.edge.ledger import LedgerEntry as LedgerEntry
from virtbus.nodeagent.vm.observation import ONCE_ONLY
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupCheck
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.records import of_node_group, of_operation
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import read

TAIL = 4000


@dataclass
class Wanted:
    """The users' knowledge of one VM: answered and unanswered requests."""

    uid: str
    name: str
    strategy: str
    asked: bool = False
    accepted: bool = False
    generation: int = 0
    power_epoch: int = 0
    powered: bool | None = None
    paused: bool | None = None
    presses: int = 0
    delete_asked: bool = False
    delete_accepted: bool = False
    refused: str = ""
    secret: bool = False
    strict: bool = False
    in_doubt: bool = False
    """A change was abandoned with an unknown outcome."""


@dataclass
class Seen:
    """Observations of one uid on the bus and the hosts."""

    record: VmRecord | None = None
    epoch: int = 0
    generation: int = 0
    power_epoch: int = 0
    purged: bool = False
    status_epoch: dict[str, int] = field(default_factory=dict)
    acted_epoch: dict[str, int] = field(default_factory=dict)
    still_asked: set[bool] = field(default_factory=set)
    """Requests of records since the last run began: to pause, to resume."""
    pressed: int = 0
    off_asked: int = 0
    """The number of record versions that ask the guest not to run here."""
    off_at_start: int = 0
    ran_generation: int = 0
    """The generation of the record when its guest last started."""
    ran_out: int = -1
    """The power epoch under which its guest last ended, on request or by itself."""
    left: set[str] = field(default_factory=set)
    """The nodes that it was asked to leave: the user agreed to lose its disks there."""
    moved_off: int = -1
    """The power epoch under which it was moved switched off, because its guest had ended."""


def _age(of: VmRecord | VmStatus) -> tuple[int, int, int]:
    return of.epoch, of.generation, of.power_epoch


class Observer(Watcher):
    """Observes everything and changes nothing."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.hosts: dict[str, Host] = {}
        self.server: SimServer
        self.slowest_ns: Callable[[], int] = loop.shown_ns
        """The earliest of the controllers' clocks."""
        self.vms: dict[str, Seen] = {}
        self.wanted: dict[str, Wanted] = {}
        self.volumes = VolumeObserver(self)
        self.snapshots = SnapshotObserver(self)
        self.image_names = ImageNameObserver(self)
        self.networks = NetworkObserver(self)
        self.addresses = AddressObserver(self)
        self.groups = GroupObserver(self)
        self.operations = OperationObserver(self)
        self.backups = BackupObserver(self)
        self.violations: list[str] = []
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.count = 0
        self.keep_all = False
        self.all: list[str] = []
        self._hash = hashlib.sha256()

    # --- trace ----------------------------------------------------------------------------
    def note(self, *what: object) -> None:
        line = f"{self.loop.time():.6f} {' '.join(map(str, what))}"
        self.count += 1
        self._hash.update(line.encode())
        self.tail.append(line)
        if self.keep_all:
            self.all.append(line)

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()[:16]

    def wrong(self, invariant: str, what: str) -> None:
        """Record a violation. Unwound work of dead processes does not count."""
        if self.loop.over:
            return
        line = f"{invariant} at {self.loop.time():.3f} s: {what}"
        self.note("VIOLATION", line)
        self.violations.append(line)

    def _vm(self, uid: str) -> Seen:
        return self.vms.setdefault(uid, Seen())

    # --- bus ------------------------------------------------------------------------------
    def wrote(self, stream: str, entry: Entry) -> None:
        """A message was stored."""
        if stream == "KV_node":
            return
        digest = hashlib.blake2b(entry.value, digest_size=4).hexdigest() if entry.value else "-"
        self.note(entry.key, entry.revision, entry.kind, digest)
        if of_operation(entry.key):
            self.operations.wrote(stream, entry)
        elif stream == "KV_vm":
            self._vm_written(entry)
        elif stream == "KV_st" and entry.kind is EntryKind.PUT and "._" not in entry.key:
            self._status_written(read(VmStatus, entry.value), entry.key)

    def _vm_written(self, entry: Entry) -> None:
        of_objects = {
            subjects.VOLUME_KEYS: self.volumes.wrote,
            subjects.SNAPSHOT_KEYS: self.snapshots.wrote,
            subjects.BACKUP_SCHEDULE_KEYS: self.backups.wrote,
            subjects.IMAGE_NAME_KEYS: self.image_names.wrote,
            subjects.NETWORK_KEYS: self.networks.wrote,
            subjects.ADDRESS_KEYS: self.addresses.wrote,
            subjects.SECURITY_GROUP_KEYS: self.groups.wrote,
        }
        for prefix, wrote in of_objects.items():
            if entry.key.startswith(prefix):
                wrote(entry)
                return
        if of_node_group(entry.key):
            self.groups.wrote(entry)
            return
        tokens = entry.key.split(".")
        if len(tokens) != 4 or tokens[3].startswith("_"):
            return
        uid, node = tokens[3], tokens[2]
        seen = self._vm(uid)
        if entry.kind is EntryKind.PURGE:
            tombstone = node == "_" and seen.record is None
            elsewhere = seen.record is not None and seen.record.node != node
            if uid in self.server.moving or tombstone or elsewhere:
                return
            self._purged(uid, seen)
            return
        message = read_vm_key(entry.key, entry.value)
        if isinstance(message, VmRecord):
            self.groups.recorded(message, entry.revision)
            self._recorded(message, seen)

    def _purged(self, uid: str, seen: Seen) -> None:
        wanted = self.wanted.get(uid)
        if wanted is not None and not wanted.delete_asked:
            self.wrong("I2", f"{uid}: the record is purged, but nobody asked for a delete")
        for host in self.hosts.values():
            if self._fenced(host) or host.copied:
                # its data is removed when the host returns; a copied disk belongs to nobody
                continue
            domain = host.domains.get(uid)
            if domain is not None:
                self.wrong("I3", f"{uid}: purged while {host.name} has a domain ({domain.state})")
            for what, held in (
                ("its disks", host.disk.overlays),
                ("its network", host.networks),
                ("its record", host.disk.records),
                ("its seed", host.disk.seeds),
            ):
                if uid in held:
                    self.wrong("I3", f"{uid}: purged while {host.name} holds {what}")
        seen.purged, seen.record = True, None
        seen.off_asked += 1

    def _fenced(self, host: Host) -> bool:
        key = subjects.node_spec(host.node)
        entry = self.server.shelf(key).entries.get(key)
        node_spec = read(NodeSpec, entry.value) if entry is not None and entry.value else None
        return node_spec is not None and node_spec.fenced is not None

    def _recorded(self, record: VmRecord, seen: Seen) -> None:
        uid = record.uid
        self.image_names.recorded(record)
        self.networks.recorded(record)
        self.addresses.recorded(record)
        if seen.purged:
            self.wrong("I3", f"{uid}: a record of a deleted VM is written")
        if record.epoch < seen.epoch:
            self.wrong("I15", f"{uid}: epoch {record.epoch} is written after {seen.epoch}")
        if record.generation < seen.generation or record.power_epoch < seen.power_epoch:
            self.wrong("I2", f"{uid}: a change that was stored is undone")
        if record.evacuating:
            seen.left.add(record.node)
        if seen.record is not None:
            self._followed(seen.record, record, seen)
        restarts = seen.record is not None and record.restart_epoch > seen.record.restart_epoch
        if record.ending or not record.powered or restarts:
            seen.off_asked += 1
        seen.still_asked.add(record.paused)
        seen.record = record
        seen.epoch = record.epoch
        seen.generation, seen.power_epoch = record.generation, record.power_epoch

    def _followed(self, old: VmRecord, new: VmRecord, seen: Seen) -> None:
        """Only a user switches off a guest that has not ended (I2)."""
        if old.deleting and not new.deleting:
            self.wrong("I3", f"{new.uid}: a delete that was stored is undone")
        if old.node != new.node:
            if new.epoch <= old.epoch:
                self.wrong("I15", f"{new.uid}: moved to {new.node} without a new epoch")
            seen.off_asked += 1
        if old.powered and not new.powered and old.power_epoch == new.power_epoch:
            seen.moved_off = new.power_epoch
            if seen.ran_out < new.power_epoch:
                self.wrong("I2", f"{new.uid}: a move undoes a start whose guest had not ended")

    def _status_written(self, status: VmStatus, key: str) -> None:
        uid = status.uid
        seen = self._vm(uid)
        if status.epoch < seen.status_epoch.get(status.node, 0):
            self.wrong("I15", f"{key}: a status of epoch {status.epoch} after a later one")
        seen.status_epoch[status.node] = status.epoch

    # --- hosts ----------------------------------------------------------------------------
    def defined(self, host: Host, domain: Domain) -> None:
        assert domain.metadata is not None
        self._acts(host, domain.uid, domain.metadata.epoch, "defines")

    def _acts(self, host: Host, uid: str, epoch: int, what: str) -> None:
        seen = self._vm(uid)
        highest = max(
            seen.acted_epoch.get(host.name, 0), host.disk.ledger.get(uid, LedgerEntry(0)).epoch
        )
        if epoch < highest:
            self.wrong("I15", f"{host.name} {what} {uid} of epoch {epoch} after {highest}")
        seen.acted_epoch[host.name] = max(epoch, highest)

    def started(self, host: Host, domain: Domain) -> None:
        uid = domain.uid
        self.note(host.name, "starting", uid)
        seen = self._vm(uid)
        seen.off_at_start = seen.off_asked
        if seen.record is not None:
            seen.still_asked = {seen.record.paused}
        if seen.purged:
            self.wrong("I3", f"{uid}: started on {host.name} after its delete was complete")
        for other in self.hosts.values():
            there = other.domains.get(uid)
            if other is not host and there is not None and there.active:
                self.wrong("I1", f"{uid} runs on {other.name} and starts on {host.name}")
        if uid not in host.disk.overlays or uid not in host.networks:
            self.wrong("I1", f"{uid} starts on {host.name} without its disks or network")
        self._started_again(host, uid, seen)
        if seen.record is not None:
            seen.ran_generation = seen.record.generation
        self.volumes.started(host, uid)
        wanted = self.wanted.get(uid)
        if wanted is not None and wanted.secret and host.disk.seeds.get(uid) is None:
            self.wrong("I2", f"{uid} boots on {host.name} without the user-data it was given")

    def _started_again(self, host: Host, uid: str, seen: Seen) -> None:
        """A VM that starts only on request, and was reported running, needs a new one (I2).

        A changed spec retries a VM that failed. Its agent may have reported the new spec before.
        """
        entry = self.server.shelf("$KV.st.x").entries.get(subjects.vm_status(host.node, uid))
        told = read(VmStatus, entry.value) if entry is not None and entry.value else None
        record = seen.record
        if told is None or record is None or record.spec.run_strategy not in ONCE_ONLY:
            return
        ran = told.ended or told.state in {VmState.RUNNING, VmState.PAUSED}
        retried = told.state is VmState.FAILED and record.generation > seen.ran_generation
        if ran and not retried and _age(told) == _age(record):
            self.wrong("I2", f"{uid} had ended ({told.state} {told.reason}), and runs again")

    def pressed(self, host: Host, domain: Domain) -> None:
        """A guest is reset: at most once for each request of a user (I6)."""
        seen = self._vm(domain.uid)
        seen.pressed += 1
        wanted = self.wanted.get(domain.uid)
        if wanted is None or seen.pressed > wanted.presses:
            self.wrong("I6", f"{host.name} resets {domain.uid} more often than it was asked to")

    def stilled(self, host: Host, domain: Domain) -> None:
        """A guest is paused or resumed: a record must have asked for it (I4)."""
        paused = domain.state is DomainState.PAUSED
        if paused not in self._vm(domain.uid).still_asked:
            self.wrong("I4", f"{host.name}: {domain.uid} is {domain.state}, and nobody asked")

    def disk_removed(self, host: Host, uid: str) -> None:
        """A guest's writes are removed: only by a delete, or after the VM was asked to leave."""
        self.note(host.name, "disk removed", uid)
        wanted = self.wanted.get(uid)
        if not ((wanted is not None and wanted.delete_asked) or host.name in self._vm(uid).left):
            self.wrong("I2", f"{host.name} removes the disks of {uid}, and nobody asked")

    def ruled(self, host: Host, record: VmRecord, groups: Mapping[str, NodeGroup]) -> None:
        self.groups.ruled(host, record, groups)

    def volume_removed(self, host: Host, folder: str) -> None:
        self.volumes.removed(host, folder)

    def volume_restored(self, host: Host, folder: str) -> None:
        self.volumes.restored(host, folder)

    def volume_filled(self, host: Host, folder: str) -> None:
        self.volumes.filled(host, folder)

    def backup_copied(self, host: Host, uid: str) -> None:
        self.backups.copied(host, uid)

    def backup_stored(self, host: Host, made: Stored) -> None:
        self.backups.stored(host, made)

    def backup_checked(self, host: Host, backup: str, check: BackupCheck) -> None:
        self.backups.checked(host, backup, check)

    def backup_removed(self, host: Host, gone: Stored) -> None:
        self.backups.removed(host, gone)

    def volume_opened(self, host: Host, domain: Domain, folder: str) -> None:
        self.volumes.opened(host, domain.uid, folder)

    def off(self, host: Host, domain: Domain, why: str) -> None:
        """A guest is off, for any reason."""
        self.note(host.name, "off", domain.uid, why)
        seen = self._vm(domain.uid)
        if domain.state is not DomainState.STARTING and seen.record is not None:
            seen.ran_out = seen.record.power_epoch

    def ended(self, host: Host, domain: Domain, why: str) -> None:
        """A service ends a guest: a request must exist (I4)."""
        seen = self._vm(domain.uid)
        self.note(host.name, why, domain.uid)
        record = seen.record
        here = record is not None and record.node == host.node
        asked = seen.off_asked > seen.off_at_start or not here
        if record is not None and (record.ending or not record.powered):
            asked = True
        if record is not None and domain.metadata is not None:  # a restart during its start
            asked = asked or domain.metadata.power_epoch < record.restart_epoch
        if not asked:
            self.wrong("I4", f"{host.name} ends {domain.uid} by {why}, and nobody asked")

    # --- after all is healed --------------------------------------------------------------
    def schedule(self, lines: int = 60) -> str:
        """Return the end of the trace, for people."""
        return "\n".join(list(self.tail)[-lines:])

    def lines_of(self, uid: str) -> list[str]:
        return [line for line in (self.all or self.tail) if uid in line]

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Return the bus's values below a prefix, without purge markers."""
        return {
            key: entry
            for shelf in self.server.shelves.values()
            for key, entry in shelf.entries.items()
            if key.startswith(prefix) and entry.kind is EntryKind.PUT
        }

    def tombstone(self, entry: Entry) -> bool:
        message: Any = read_vm_key(entry.key, entry.value)
        return not isinstance(message, VmRecord)
