"""Pools of addresses: the addresses that a network may give to interfaces (ADR 0064).

Addresses are compared by their canonical text, because caches and state files contain texts.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, StringConstraints

from virtbus.schemas.ip_types import Address as Address
from virtbus.schemas.ip_types import Net as Net

Span = tuple[int, int]
"""The first and the last of consecutive addresses, as numbers."""


def span_of(text: str) -> tuple[Address, Address]:
    """Return the first and last address of `10.0.0.5` or `10.0.0.5-10.0.0.9`.

    Raises:
        ValueError: `text` is malformed, its ends differ in IP version, or its end is before its
            start.
    """
    start, dash, end = text.partition("-")
    first = ip_address(start.strip())
    last = ip_address(end.strip()) if dash else first
    if first.version != last.version or int(first) > int(last):
        msg = "must be an address, or the first and last one, such as 10.0.0.5-10.0.0.9"
        raise ValueError(msg)
    return first, last


def _range(text: str) -> str:
    try:
        first, last = span_of(text)
    except ValueError:
        msg = "must be an address, or the first and last one, such as 10.0.0.5-10.0.0.9"
        raise ValueError(msg) from None
    return str(first) if first == last else f"{first}-{last}"


AddressRange = Annotated[str, StringConstraints(max_length=79), AfterValidator(_range)]


class AddressPool(NamedTuple):
    """The addresses of one subnet that may be given out.

    virtbus chooses addresses from `spans`. A user may ask for any address in `hosts`.
    """

    subnet: Net
    gateway: Address | None
    spans: tuple[Span, ...]
    hosts: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)

    def has(self, address: Address) -> bool:
        """Return True if a user may ask for the address for an interface."""
        if address.version != self.subnet.version:
            return False
        return any(first <= int(address) <= last for first, last in self.hosts)

    def choose(
        self, key: str, taken: Collection[str], freed: Mapping[str, int] | None = None
    ) -> Address | None:
        """Return a free address, the same for the same `key` if possible; None if all are taken.

        `freed` maps each released address to a number that rises with each release. Released
        addresses are chosen last, in the order of their release.
        """
        known = freed or {}
        size = self.size
        start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big")
        for step in range(min(size, len(taken) + len(known) + 1)):
            address = self._at((start + step) % size)
            if (text := str(address)) not in taken and text not in known:
                return address
        for text in sorted(known, key=known.__getitem__):
            address = ip_address(text)
            if text not in taken and self._chooses(address):
                return address
        return None

    def _chooses(self, address: Address) -> bool:
        same = address.version == self.subnet.version
        return same and any(first <= int(address) <= last for first, last in self.spans)

    def _at(self, index: int) -> Address:
        for first, last in self.spans:
            if index <= last - first:
                return _address(self.subnet, first + index)
            index -= last - first + 1
        raise IndexError(index)


def overlapping(one: Net, other: Net) -> bool:
    """Return True if two subnets have a common address; False if their IP versions differ."""
    if isinstance(one, IPv4Network):
        return isinstance(other, IPv4Network) and one.overlaps(other)
    return isinstance(other, IPv6Network) and one.overlaps(other)


def pool_of(
    subnet: Net, gateway: Address | None, ranges: Iterable[str] = (), excluded: Iterable[str] = ()
) -> AddressPool:
    """Return the pool of a subnet, without the gateway and the `excluded` addresses.

    virtbus chooses from the host addresses in `ranges`. If the subnet has none of these, virtbus
    chooses from the whole subnet.
    """
    own = _in(subnet, ranges)
    closed = [*_in(subnet, excluded), *(() if gateway is None else ((int(gateway),) * 2,))]
    hosts = tuple(_without([_hosts(subnet)], closed))
    spans = tuple(_without(own, closed)) if own else hosts
    return AddressPool(subnet, gateway, spans, hosts)


def _hosts(subnet: Net) -> Span:
    """Return the host addresses: without the network address and the IPv4 broadcast address."""
    last = int(subnet.broadcast_address) - (subnet.version == 4)
    return int(subnet.network_address) + 1, last


def _in(subnet: Net, ranges: Iterable[str]) -> list[tuple[int, int]]:
    """Return the parts of `ranges` that are host addresses of the subnet, sorted."""
    found = (span_of(text) for text in ranges)
    least, most = _hosts(subnet)
    cut = (
        (max(int(first), least), min(int(last), most))
        for first, last in found
        if first.version == subnet.version
    )
    return sorted(span for span in cut if span[0] <= span[1])


def _without(spans: Iterable[Span], closed: Iterable[Span]) -> Iterator[Span]:
    for first, last in spans:
        start = first
        for low, high in sorted(closed):
            if high < start or low > last:
                continue
            if low > start:
                yield start, low - 1
            start = high + 1
        if start <= last:
            yield start, last


def _address(subnet: Net, number: int) -> Address:
    return IPv4Address(number) if subnet.version == 4 else IPv6Address(number)
