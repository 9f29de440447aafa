"""Checks the subnets, gateways and pools of a network (ADR 0064)."""

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from virtbus.controller.core.networks import every_subnet
from virtbus.schemas.address_pool import Address, Net, overlapping, pool_of, span_of
from virtbus.schemas.errors import Detail
from virtbus.schemas.network_object import ON_SEGMENTS, NetworkKind, NetworkSpec

WITH_RESOLVER = frozenset({NetworkKind.NAT, NetworkKind.ROUTED, NetworkKind.OVERLAY})
"""Kinds of networks whose gateway resolves names for the guests."""


def within(one: Net, other: Net) -> bool:
    """Return True if all addresses of `one` are in `other`."""
    return overlapping(one, other) and one.prefixlen >= other.prefixlen


def subnet_problems(spec: NetworkSpec) -> Iterator[Detail]:
    """Yield the problems of a network's subnets, gateways and pools, each with its field path."""
    yield from _of_kind(spec)
    yield from _gateways(spec)
    yield from _overlaps(spec)
    yield from _pool_problems(spec)


def _of_kind(spec: NetworkSpec) -> Iterator[Detail]:
    """Yield the problems of a network that is not on a segment of the hosts' LAN.

    An IPv6 subnet needs an IPv4 subnet, and IPv4 subnets must be private. If the gateway resolves
    names, name servers must have IPv4 addresses, because the gateway asks over IPv4 only.
    """
    if spec.kind in ON_SEGMENTS:
        return
    for node in sorted(set(spec.subnets6) - set(spec.subnets)):
        hint = f"give subnets.{node}, too; only segments (link) have IPv6 alone"
        yield Detail(path=f"spec.subnets6.{node}", message="needs a subnet of IPv4", hint=hint)
    if spec.subnet6 and not spec.subnet:
        hint = "give subnet, too; only segments (link) have IPv6 alone"
        yield Detail(path="spec.subnet6", message="needs a subnet of IPv4", hint=hint)
    for at, server in enumerate(spec.dns if spec.kind in WITH_RESOLVER else ()):
        if ":" in server:
            hint = "give an IPv4 address of the server"
            message = "is asked by the gateway, which has IPv4"
            yield Detail(path=f"spec.dns[{at}]", message=message, hint=hint)
    for path, subnet in every_subnet(spec):
        if subnet.version == 4 and not subnet.is_private:
            message = "must be private"
            hint = "choose one of 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16"
            yield Detail(path=path, message=message, hint=hint)


def _gateways(spec: NetworkSpec) -> Iterator[Detail]:
    pairs = ("gateway", spec.gateway, spec.subnet), ("gateway6", spec.gateway6, spec.subnet6)
    for field, text, net in pairs:
        path = f"spec.{field}"
        if text is None:
            continue
        gateway = ip_address(text)
        if net is None:
            hint = f"give {field.replace('gateway', 'subnet')}, or leave it out"
            yield Detail(path=path, message="needs a subnet", hint=hint)
        elif spec.kind in ON_SEGMENTS and gateway.version == 6:
            if not gateway.is_link_local:
                hint = "as `ip -6 route` shows it on another host there, such as fe80::1"
                message = "must be the link-local address of the segment's router"
                yield Detail(path=path, message=message, hint=hint)
        elif not pool_of(subnet := ip_network(net), None).has(gateway):
            message, hint = f"is no host of {subnet}", f"such as {subnet[1]}"
            yield Detail(path=path, message=message, hint=hint)


def _overlaps(spec: NetworkSpec) -> Iterator[Detail]:
    """Yield each subnet that overlaps another one; only the one whose path sorts later is named."""
    nets = sorted(every_subnet(spec), key=lambda one: one[0])
    for index, (path, subnet) in enumerate(nets):
        for earlier, theirs in nets[:index]:
            if overlapping(subnet, theirs):
                message = f"overlaps {theirs} of {earlier.rpartition('.')[2]}"
                yield Detail(path=path, message=message, hint="choose another")


def _pool_problems(spec: NetworkSpec) -> Iterator[Detail]:
    """Yield the problems of address ranges and exclusions, each with its field path."""
    nets = [subnet for _, subnet in every_subnet(spec)]
    yield from _outside("ranges", spec.ranges, nets)
    yield from _outside("excluded", spec.excluded, nets)
    spans = [span_of(text) for text in spec.ranges]
    for index, (first, last) in enumerate(spans):
        for at, (low, high) in enumerate(spans[:index]):
            if first.version == low.version and int(first) <= int(high) and int(low) <= int(last):
                message, hint = f"overlaps ranges[{at}]", "give each address once"
                yield Detail(path=f"spec.ranges[{index}]", message=message, hint=hint)
    for pool in spec.pools():
        if not pool.size:
            message = f"no address of {pool.subnet} is left for interfaces"
            hint = "exclude fewer, or choose a larger subnet"
            yield Detail(path="spec.excluded", message=message, hint=hint)


def _outside(field: str, ranges: tuple[str, ...], nets: list[Net]) -> Iterator[Detail]:
    for index, text in enumerate(ranges):
        first, last = span_of(text)
        if not any(_inside(first, last, subnet) for subnet in nets):
            shown = ", ".join(map(str, nets)) or "the network, which has no subnet"
            message, hint = f"is not within {shown}", "choose addresses of a subnet"
            yield Detail(path=f"spec.{field}[{index}]", message=message, hint=hint)


def _inside(first: Address, last: Address, subnet: Net) -> bool:
    return first in subnet and last in subnet
