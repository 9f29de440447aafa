"""Index of the addresses, MACs and ports of a host's VMs. No lookup reads all interfaces."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.freed_addresses import Freed, FreedAddresses, Journal, releases_of


class UsedNics:
    """The interfaces of all VMs of a host, with their addresses, MACs and ports."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._freed = FreedAddresses()
        self._of: dict[str, tuple[Nic, ...]] = {}
        self._macs: dict[str, list[str]] = {}
        self._addresses: dict[tuple[str, str], Counter[str]] = {}
        self._on_network: Counter[tuple[str, str]] = Counter()
        self._on_host_link: dict[str, dict[tuple[str, int], Nic]] = {}
        self._publishing: dict[str, list[Nic]] = {}

    def put(self, uid: str, nics: Sequence[Nic]) -> None:
        """Set the interfaces of a VM. Addresses that the VM no longer has are released."""
        before = self._of.get(uid)
        if before == tuple(nics):
            return
        self._release(releases_of(uid, before or (), left=nics))
        self._remove(uid)
        self._of[uid] = tuple(nics)
        for nic in nics:
            key = _network(nic)
            self._macs.setdefault(nic.mac, []).append(uid)
            self._addresses.setdefault(key, Counter()).update(_plain(nic))
            self._on_network[key] += 1
            self._on_host_link.setdefault(nic.host_place, {})[(uid, nic.index)] = nic
        if publishing := [nic for nic in nics if nic.publish]:
            self._publishing[uid] = publishing

    def drop(self, uid: str) -> None:
        self._release(releases_of(uid, self._of.get(uid, ())))
        self._remove(uid)

    def recall(self) -> None:
        if self._journal is not None:
            self._freed.add(self._journal.all())

    def _release(self, releases: Iterator[Freed]) -> None:
        found = list(releases)
        self._freed.add(found)
        if self._journal is not None:
            self._journal.append(found)

    def _remove(self, uid: str) -> None:
        self._publishing.pop(uid, None)
        for nic in self._of.pop(uid, ()):
            key, place = _network(nic), nic.host_place
            self._macs[nic.mac].remove(uid)
            if not self._macs[nic.mac]:
                del self._macs[nic.mac]
            self._on_host_link[place].pop((uid, nic.index))
            if not self._on_host_link[place]:
                del self._on_host_link[place]
            for address in _plain(nic):
                _less(self._addresses[key], address)
            _less(self._on_network, key)
            if key not in self._on_network:
                del self._addresses[key]

    @contextmanager
    def without(self, uid: str) -> Iterator[Self]:
        """Leave out a VM while it is planned. At the end, its interfaces are as before."""
        before = self._of.get(uid)
        self._remove(uid)
        try:
            yield self
        finally:
            self._remove(uid)
            if before is not None:
                self.put(uid, before)

    def ports(self, nic: Nic) -> int:
        return self._on_network[_network(nic)]

    def addresses(self, nic: Nic) -> Collection[str]:
        return self._addresses.get(_network(nic), Counter())

    def freed(self, nic: Nic) -> Mapping[str, int]:
        return self._freed.of(nic)

    def remembered(self, nic: Nic, uid: str) -> Nic:
        """Return the interface. If it has no addresses, it gets those that it released before."""
        if nic.addresses:
            return nic
        return nic.model_copy(update={"addresses": self._freed.former(nic, uid)})

    def on_host_link(self, name: str) -> Collection[Nic]:
        """Return the interfaces on a bridge or an interface of the host, by `Nic.host_place`."""
        return self._on_host_link.get(name, {}).values()

    def publishing(self, but: str) -> list[Nic]:
        return [nic for uid, nics in self._publishing.items() if uid != but for nic in nics]

    def has_mac(self, mac: str, but: str) -> bool:
        return any(uid != but for uid in self._macs.get(mac, ()))


def _less(counts: Counter[Any], what: object) -> None:
    counts[what] -= 1
    if not counts[what]:
        del counts[what]


def _network(nic: Nic) -> tuple[str, str]:
    return nic.kind, nic.place


def _plain(nic: Nic) -> list[str]:
    return [address.partition("/")[0] for address in nic.addresses]
