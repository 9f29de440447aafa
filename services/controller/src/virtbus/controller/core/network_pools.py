"""Checks the subnets and pools of a network: overlaps, ranges and exclusions (ADR 0064)."""

from collections.abc import Iterator

from virtbus.controller.core.networks import every_subnet
from virtbus.schemas.address_pool import Address, Net, overlapping, span_of
from virtbus.schemas.errors import Detail
from virtbus.schemas.network_object import NetworkSpec


def within(one: Net, other: Net) -> bool:
    """Return True if all addresses of `one` are in `other`."""
    return overlapping(one, other) and one.prefixlen >= other.prefixlen


def overlaps(spec: NetworkSpec) -> Iterator[Detail]:
    """Yield the subnets that overlap an earlier one of the network, with their fields."""
    nets = sorted(every_subnet(spec), key=lambda one: one[0])
    for index, (path, subnet) in enumerate(nets):
        for earlier, theirs in nets[:index]:
            if overlapping(subnet, theirs):
                message = f"overlaps {theirs} of {earlier.rpartition('.')[2]}"
                yield Detail(path=path, message=message, hint="choose another")


def pool_problems(spec: NetworkSpec) -> Iterator[Detail]:
    """Yield what is wrong with the ranges and exclusions of a network, with their fields."""
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
