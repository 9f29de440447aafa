"""Meaning of a DNS name on a host: a VM, an address, or a name of other servers."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from virtbus.netd.core.reach import Address
from virtbus.schemas.id_grammar import is_id

_REVERSE_4, _REVERSE_6 = ("in-addr", "arpa"), ("ip6", "arpa")


@dataclass(frozen=True, slots=True)
class VmName:
    """The name of a VM that may exist."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ReverseName:
    """The DNS name that stands for an address, below `in-addr.arpa` or `ip6.arpa`.

    `own` is True for an address in the host's own network, whose names only this host knows.
    `authority` is the DNS zone of the name.
    """

    address: Address
    own: bool
    authority: str


@dataclass(frozen=True, slots=True)
class ZoneName:
    """A name in the zone that no VM can have.

    `exists` is True if the name is the zone itself, or a namespace in the zone.
    """

    exists: bool


Meaning = VmName | ReverseName | ZoneName | None
"""None means a name outside of the zone, which other servers know."""


@dataclass(frozen=True, slots=True)
class Zone:
    """The domain below which VMs have their names, and the network of the host's guests."""

    domain: str
    network: IPv4Network
    network6: IPv6Network | None = None

    def name_of(self, namespace: str, name: str) -> str:
        return f"{name}.{namespace}.{self.domain}"

    def meaning(self, labels: tuple[str, ...]) -> Meaning:
        domain = tuple(self.domain.split("."))
        if labels[-len(domain) :] == domain:
            return _below(labels[: -len(domain)])
        address = _reversed(labels)
        if address is None:
            return None
        own = self.has(address)
        depth = 4 - self.network.prefixlen // 8 if own and address.version == 4 else 1
        return ReverseName(address, own, ".".join(labels[depth:]))

    def has(self, address: Address) -> bool:
        return address in self.network or (self.network6 is not None and address in self.network6)


def _below(labels: tuple[str, ...]) -> VmName | ZoneName:
    if len(labels) > 2 or not all(is_id(label) for label in labels):
        return ZoneName(exists=False)
    if len(labels) == 2:
        return VmName(namespace=labels[1], name=labels[0])
    return ZoneName(exists=True)


def _reversed(labels: tuple[str, ...]) -> Address | None:
    digits, end = labels[:-2], labels[-2:]
    try:
        if end == _REVERSE_4 and len(digits) == 4:
            return IPv4Address(".".join(reversed(digits)))
        if end == _REVERSE_6 and len(digits) == 32 and all(len(digit) == 1 for digit in digits):
            return IPv6Address(int("".join(reversed(digits)), 16))
    except ValueError:
        return None
    return None
