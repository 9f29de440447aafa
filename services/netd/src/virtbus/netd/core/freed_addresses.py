"""Addresses that interfaces of this host released, in the order of the releases."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from virtbus.netd.core.attachment import Nic

PER_NETWORK, NETWORKS = 1024, 256
"""Maximum number of remembered releases of a network, and of remembered networks."""


class Freed(NamedTuple):
    """An address that an interface has released."""

    network: str
    owner: str
    """The uid of the VM and the name of the interface, as `<uid>/<name>`."""
    address: str
    """The address with its prefix length."""


class Journal(Protocol):
    """Keeps releases over a restart of netd."""

    def append(self, releases: Iterable[Freed]) -> None:
        """Store further releases, after the stored releases."""

    def all(self) -> list[Freed]:
        """Return the stored releases, the oldest first."""


class FreedAddresses:
    """The released addresses of each network. The caller knows which of them are in use again."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Freed]] = {}

    def add(self, releases: Iterable[Freed]) -> None:
        """Remember releases, as the latest of their networks."""
        for one in releases:
            there = self._of.pop(one.network, {})
            self._of[one.network] = there
            plain = one.address.partition("/")[0]
            there.pop(plain, None)
            there[plain] = one
            if len(there) > PER_NETWORK:
                del there[next(iter(there))]
            if len(self._of) > NETWORKS:
                del self._of[next(iter(self._of))]

    def of(self, nic: Nic) -> Mapping[str, int]:
        there = self._of.get(network_of(nic), {})
        return {address: order for order, address in enumerate(there)}

    def former(self, nic: Nic, uid: str) -> tuple[str, ...]:
        """Return the remembered addresses that the interface itself released, the latest first."""
        there = reversed(self._of.get(network_of(nic), {}).values())
        return tuple(one.address for one in there if one.owner == _owner(nic, uid))


def releases_of(uid: str, nics: Iterable[Nic], left: Iterable[Nic] = ()) -> Iterator[Freed]:
    """Yield the addresses of a VM's interfaces that no interface in `left` has."""
    kept = {(network_of(nic), address) for nic in left for address in nic.addresses}
    for nic in nics:
        network = network_of(nic)
        for address in nic.addresses:
            if (network, address) not in kept:
                yield Freed(network, _owner(nic, uid), address)


def network_of(nic: Nic) -> str:
    """Return the key under which the addresses of an interface's network are remembered."""
    return f"{nic.kind} {nic.place}"


def _owner(nic: Nic, uid: str) -> str:
    return f"{uid}/{nic.name}"
