"""Observes volumes: one holder, on the node of the data, until an explicit delete.

A shared volume has several holders, on that one node.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.sim.machine import Host

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas.records import read_volume
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import FillState, VolumeRecord

if TYPE_CHECKING:
    from tests.sim.observer import Observer


class VolumeObserver:
    """The volumes on the bus and on the hosts."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self.records: dict[str, VolumeRecord] = {}
        """By folder: the volume's record on the bus."""
        self.delete_asked: set[str] = set()
        self._keys: dict[str, str] = {}

    def wrote(self, entry: Entry) -> None:
        """A volume was written or purged."""
        if entry.kind is EntryKind.PURGE:
            self._purged(self._keys.pop(entry.key, ""))
            return
        record = read_volume(entry.key, entry.value)
        folder = ref_of(record).folder
        old = self.records.get(folder)
        if self._keys.get(entry.key, folder) != folder:
            self._wrong("I3", f"{entry.key} is replaced by {record.uid} without a delete")
        asked = record.uid in self.delete_asked or (old is not None and self._ends(old))
        if record.deleting and not asked:
            self._wrong("I2", f"{folder} is being deleted, and nobody asked")
        if old is not None and old.deleting and not record.deleting:
            self._wrong("I3", f"{folder}: a delete that was stored is undone")
        if old is not None and old.bound and old.node != record.node:
            self._moved(folder, old, record.node)
        users = self._users(folder) if record.is_moving else ()
        for uid, there in users:
            self._wrong("I1", f"{folder} is moved under {uid} on {there}")
        others = set(record.holders) - set(old.holders) if old is not None else set()
        if old is not None and old.holders and others and not record.spec.is_shared:
            self._wrong("I1", f"{folder}: {record.holder} takes it from {old.holder}")
        self.records[folder], self._keys[entry.key] = record, folder

    def _moved(self, folder: str, old: VolumeRecord, node: str) -> None:
        """A volume is on another node: only by a move, once all its data is there."""
        self._observer.note("volume moved", folder, old.node, node)
        asked = old.is_moving and old.move is not None and old.move.target == node
        if not asked or folder not in self._observer.hosts[node].disk.volumes:
            self._wrong("I2", f"{folder} moves from {old.node} to {node} without its data")

    def _ends(self, volume: VolumeRecord) -> bool:
        """Return True if the volume ends with its holder: that VM made it, and is being deleted."""
        seen = self._observer.vms.get(volume.holder)
        deleting = seen is not None and seen.record is not None and seen.record.deleting
        return volume.deleting or (deleting and volume.ends_with == volume.holder)

    def _purged(self, folder: str) -> None:
        record = self.records.pop(folder, None)
        if record is None:
            return
        if record.holder or not record.deleting:
            self._wrong("I2", f"{folder} is purged while it is held or not being deleted")
        for host in self._hosts():
            if folder in host.disk.volumes:
                self._wrong("I5", f"{folder} is purged, and {host.name} has its data")

    # --- hosts ----------------------------------------------------------------------------
    def started(self, host: Host, uid: str) -> None:
        """A guest starts: it holds its volumes, and no other guest has them."""
        for folder in host.domains[uid].volumes.values():
            self.opened(host, uid, folder)

    def opened(self, host: Host, uid: str, folder: str) -> None:
        """A guest gets a volume: its VM holds it, and no other guest has one that is not shared."""
        self._observer.note(host.name, "volume opened", uid, folder)
        if folder not in host.disk.volumes:
            self._wrong("I1", f"{uid} runs on {host.name} without its volume {folder}")
        record = self.records.get(folder)
        if record is None or uid not in record.holders:
            self._wrong("I1", f"{uid} runs on {host.name} and does not hold {folder}")
        elif record.is_moving or record.node != host.node:
            self._wrong("I1", f"{uid} runs on {host.name} with a copy of {folder} that leaves it")
        for other, there in self._users(folder):
            may_share = record is not None and record.spec.is_shared and there == host.name
            if other != uid and not may_share:
                self._wrong("I1", f"{uid} and {other} on {there} have {folder}")
            elif other != uid:
                self._observer.note("volume shared", folder, other, uid)

    def filled(self, host: Host, folder: str) -> None:
        """A volume gets its content on a host: only the one that its record names."""
        self._observer.note(host.name, "volume filled", folder)
        record = self.records.get(folder)
        move = record.move if record is not None and record.has_open_move else None
        target = move.target if move is not None else ""  # also of a move that fails meanwhile
        if record is not None and host.node not in {record.node, target}:
            self._wrong("I2", f"{folder} is of {record.node}, and is filled on {host.name}")
        for uid, there in self._users(folder):
            self._wrong("I1", f"{folder} is filled under {uid} on {there}")

    def restored(self, host: Host, folder: str) -> None:
        """The content of a volume is replaced: on its node, and under no guest."""
        self._observer.note(host.name, "volume restored", folder)
        record = self.records.get(folder)
        if record is not None and record.node != host.node:
            self._wrong("I2", f"{folder} is of {record.node}, and is restored on {host.name}")
        for uid, there in self._users(folder):
            self._wrong("I1", f"{folder} is restored under {uid} on {there}")

    def removed(self, host: Host, folder: str) -> None:
        """The data of a volume is removed: only by a delete, and under no guest."""
        self._observer.note(host.name, "volume removed", folder)
        record = self.records.get(folder)
        counts = record is not None and record.node == host.node
        if record is not None and not record.deleting and (counts or record.is_moving):
            self._wrong("I2", f"{host.name} removes {folder}, and nobody asked")
        for uid, there in self._users(folder):
            if there == host.name:  # after a move, that on another host has another copy
                self._wrong("I1", f"{host.name} removes {folder} under {uid}")

    def _users(self, folder: str) -> Iterator[tuple[str, str]]:
        """Yield the guests that have a volume, with their hosts."""
        for host in self._hosts():
            for uid, domain in host.domains.items():
                if domain.active and folder in domain.volumes.values():
                    yield uid, host.name

    def _hosts(self) -> list[Host]:
        return [host for host in self._observer.hosts.values() if not host.copied]

    # --- settled --------------------------------------------------------------------------
    def home(self, vm: VmRecord) -> str:
        """Return the node of a VM's volumes; empty if they have none."""
        found = [self.records.get(ref.folder) for ref in vm.volume_refs.values()]
        return next((one.node for one in found if one is not None and one.node), "")

    def without_content(self, vm: VmRecord) -> set[str]:
        """Return the folders of the VM's volumes into which the copy has failed.

        The VM waits for a user. If such a volume was attached while it ran, it runs without it.
        """
        folders = (ref.folder for ref in vm.volume_refs.values())
        found = ((folder, self.records.get(folder)) for folder in folders)
        return {
            folder
            for folder, one in found
            if one is not None and one.fill is not None and one.fill.state is FillState.FAILED
        }

    def at_rest(self) -> Iterator[tuple[str, str]]:
        """Yield volumes without their holders, data without a volume, and the reverse."""
        holders = self._holders()
        for folder, one in self.records.items():
            if set(one.holders) != holders.pop(folder, set()):
                yield "I5", f"{folder} is held by {one.holders}, and its VMs differ"
            yield from _left(folder, one)
        for folder, uids in holders.items():
            yield "I2", f"{uids} have lost their volume {folder}"
        for host in self._hosts():
            for folder in host.disk.volumes:
                there = self.records.get(folder)
                if there is None or there.node != host.node:
                    yield "I5", f"{host.name} has the data of {folder}, which is not there"
        yield from self._fills()

    def _holders(self) -> dict[str, set[str]]:
        """Return the VMs whose records name a volume, by its folder."""
        holders: dict[str, set[str]] = {}
        records = (seen.record for seen in self._observer.vms.values())
        for record in filter(None, records):
            for ref in record.volume_refs.values():
                holders.setdefault(ref.folder, set()).add(record.uid)
        return holders

    def _fills(self) -> Iterator[tuple[str, str]]:
        """Yield copies that have not ended, and those whose state differs from their data."""
        for folder, one in self.records.items():
            if one.fill is None or one.deleting:
                continue
            there = any(folder in host.disk.volumes for host in self._hosts())
            if one.fill.state is FillState.FILLING:
                yield "I8", f"{folder} is still being filled"
            elif there != (one.fill.state is FillState.FILLED):
                yield "I5", f"{folder} is {one.fill.state}, and its data differs"

    def at_rest_in_guests(self) -> Iterator[tuple[str, str]]:
        """Yield volumes that a guest has and its VM does not hold, and detaches that hang.

        A paused guest cannot release a disk.
        """
        for folder, one in self.records.items():
            for uid, there in self._users(folder):
                if uid not in one.holders:
                    yield "I1", f"{uid} on {there} has {folder} without holding it"
        for seen in self._observer.vms.values():
            record = seen.record
            if record is not None and record.detaching and not record.paused:
                yield "I8", f"{record.uid} still detaches {sorted(record.detaching)}"

    def _wrong(self, invariant: str, what: str) -> None:
        self._observer.wrong(invariant, what)


def _left(folder: str, volume: VolumeRecord) -> Iterator[tuple[str, str]]:
    """Yield a volume that should be gone."""
    if volume.deleting:
        yield "I8", f"{folder} is still being deleted"
    elif volume.has_open_move:
        yield "I8", f"the move of {folder} has not ended"
    elif volume.ends_with and not volume.holder:
        yield "I5", f"{folder} is left of {volume.made_for}, which it should end with"
