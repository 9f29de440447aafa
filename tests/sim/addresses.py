"""Observes claimed addresses: none is given to two VMs, or released while its VM exists."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.claims import addresses_of
from virtbus.schemas.records import read_address_claim
from virtbus.schemas.subjects import claimed_address
from virtbus.schemas.vm import VmRecord

if TYPE_CHECKING:
    from tests.sim.observer import Observer


class AddressObserver:
    """The claims on the bus, the records that have them, and the guests' networks on hosts."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._holders: dict[str, str] = {}
        """By key: the uid of the VM that claims the address."""

    def wrote(self, entry: Entry) -> None:
        """A claim was written or released."""
        before = self._holders.pop(entry.key, "")
        if entry.kind is EntryKind.PUT:
            self._holders[entry.key] = read_address_claim(entry.key, entry.value).vm
        if before and self._holders.get(entry.key) != before:
            self._left(entry.key, before)

    def _left(self, key: str, uid: str) -> None:
        """The VM does not claim the address any more: neither its record nor a host has it."""
        seen = self._observer.vms.get(uid)
        claimed = addresses_of(seen.record) if seen is not None and seen.record is not None else []
        if key in claimed:
            self._observer.wrong("I13", f"{uid} lost {key}, which its record has")
        _, address = claimed_address(key)
        if address in {claimed_address(one)[1] for one in claimed}:
            return  # it has the same address on another network
        for host in self._observer.hosts.values():
            if not host.copied and host.networks.get(uid, (0, ""))[1] == address:
                self._observer.wrong("I13", f"{key} is free while {uid} has it on {host.name}")

    def recorded(self, record: VmRecord) -> None:
        """A VM's record was written: it holds its addresses, and no other VM has them."""
        for key in addresses_of(record):
            if self._holders.get(key) != record.uid:
                holder = self._holders.get(key, "nobody")
                self._observer.wrong("I13", f"{record.uid} has {key}, claimed by {holder}")

    def at_rest(self) -> Iterator[tuple[str, str]]:
        """Yield claims without a VM, and guests that have another address than their record."""
        records = {
            uid: seen.record for uid, seen in self._observer.vms.items() if seen.record is not None
        }
        for key, uid in self._holders.items():
            record = records.get(uid)
            if record is None or key not in addresses_of(record):
                yield "I5", f"{key} is claimed by {uid}, which does not have it"
        for uid, record in records.items():
            claims = record.address_claims.values()
            wanted = {address for one in claims for address in one.addresses}
            host = self._observer.hosts.get(record.node)
            _, address = host.networks.get(uid, (0, "")) if host is not None else (0, "")
            if wanted and address and address not in wanted:
                yield "I13", f"{uid} has {address} on {record.node}, and claims {wanted}"
