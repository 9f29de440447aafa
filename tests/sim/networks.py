"""Observes networks: none ends while a VM uses it, and a VM keeps the network of its create."""

from typing import TYPE_CHECKING

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.schemas.network_object import NetworkTarget
from virtbus.schemas.records import read_network
from virtbus.schemas.vm import VmRecord

if TYPE_CHECKING:
    from tests.sim.observer import Observer


class NetworkObserver:
    """All networks that the bus had, and those in the records of VMs."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._there: dict[str, str] = {}
        """By key: the uid of the network."""
        self._had: list[NetworkTarget] = []
        self._kept: dict[str, dict[str, NetworkTarget]] = {}
        """By uid: the networks in the VM's first record."""

    def wrote(self, entry: Entry) -> None:
        """A network was made, changed or ended."""
        if entry.kind is EntryKind.PUT:
            record = read_network(entry.key, entry.value)
            self._there[entry.key] = record.uid
            self._had.append(record.target)
            return
        uid = self._there.pop(entry.key, "")
        for seen in self._observer.vms.values():
            vm = seen.record
            if vm is not None and uid in {one.uid for one in vm.network_targets.values()}:
                self._observer.wrong("I2", f"network {uid} ended while {vm.uid} uses it")

    def recorded(self, record: VmRecord) -> None:
        """A VM's record was written."""
        kept = self._kept.setdefault(record.uid, dict(record.network_targets))
        if kept != record.network_targets:
            self._observer.wrong("I2", f"{record.uid}: its network changed")
        for name, target in record.network_targets.items():
            if target not in self._had:
                self._observer.wrong("I2", f"{record.uid}: {name} never was {target}")
