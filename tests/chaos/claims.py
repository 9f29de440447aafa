"""Observes each write about claimed addresses: none is of two VMs, or free while its VM has it.

It follows the bus as the simulation does (tests/sim/addresses.py). After a fault on the bus the
watch begins with a full list again, which is checked as a whole.
"""

from contextlib import suppress
from dataclasses import dataclass, field

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.controller.core.claims import addresses_of
from virtbus.controller.core.vm_keys import read_vm_key
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.subjects import claimed_address
from virtbus.schemas.vm import VmRecord


@dataclass
class Claims:
    """`holders` has the uid of each claim, and `records` the VMs by uid."""

    wrong: list[str] = field(default_factory=list)
    looks: int = 0
    holders: dict[str, str] = field(default_factory=dict)
    records: dict[str, tuple[str, VmRecord]] = field(default_factory=dict)
    """By uid: the key of the record, and the record."""
    _keys: dict[str, str] = field(default_factory=dict)
    _first: dict[str, list[str]] = field(default_factory=dict)
    """By uid: the addresses that the VM had first, which it keeps."""
    _listing: bool = True

    async def watch(self, admin: NatsBus) -> None:
        """Follow all writes until cancelled."""
        async with admin.watch("$KV.vm.>") as watch:
            async for item in watch:
                if item is WatchMark.RESET:
                    self._listing = True
                    self.holders.clear()
                    self.records.clear()
                    self._keys.clear()
                elif item is WatchMark.SYNCED:
                    self._listing = False
                    for _, record in self.records.values():
                        self._recorded(record)
                elif isinstance(item, Entry):
                    self._wrote(item)

    def _wrote(self, entry: Entry) -> None:
        message = None
        if entry.kind is EntryKind.PUT:
            with suppress(VirtbusError):  # a node wrote it over a link that corrupts
                message = read_vm_key(entry.key, entry.value)
        if isinstance(message, VmRecord):
            self._keys[entry.key] = message.uid
            self.records[message.uid] = (entry.key, message)
            if not self._listing:
                self._recorded(message)
            return
        uid = self._keys.pop(entry.key, "")
        if uid and self.records[uid][0] == entry.key:
            del self.records[uid]
        before = self.holders.pop(entry.key, "")
        if isinstance(message, AddressClaim):
            self.holders[entry.key] = message.vm
        if before and before != self.holders.get(entry.key) and not self._listing:
            self.looks += 1
            held = self.records.get(before)
            if held is not None and entry.key in addresses_of(held[1]):
                self.wrong.append(f"{before} lost {_named(entry.key)}, which its record has")

    def _recorded(self, record: VmRecord) -> None:
        """A VM's record holds its addresses, the same ones in its whole life."""
        self.looks += 1
        has = addresses_of(record)
        first = self._first.setdefault(record.uid, has)
        if has != first:
            self.wrong.append(f"{record.uid} had {first}, and has {has}")
        for key in has:
            if self.holders.get(key) != record.uid:
                holder = self.holders.get(key, "nobody")
                self.wrong.append(f"{record.uid} has {_named(key)}, claimed by {holder}")

    def orphans(self) -> list[str]:
        """Return the claims without a VM."""
        return [
            f"{_named(key)} is claimed by {uid}, which does not have it"
            for key, uid in self.holders.items()
            if uid not in self.records or key not in addresses_of(self.records[uid][1])
        ]

    def count(self, network: str) -> int:
        """Return the number of addresses of a network that are claimed."""
        return sum(claimed_address(key)[0] == network for key in self.holders)

    def of(self, uid: str) -> list[str]:
        """Return the addresses that a VM claims."""
        held = self.records.get(uid)
        return [] if held is None else [claimed_address(key)[1] for key in addresses_of(held[1])]


def _named(key: str) -> str:
    return " ".join(claimed_address(key))
