"""The gateways of a network on a host, by IP version."""

from ipaddress import IPv4Interface, IPv6Interface
from typing import NamedTuple

from virtbus.schemas.address_pool import Net, overlapping


class Gateways(NamedTuple):
    """The host's addresses in a network's subnets; `six` is None without IPv6."""

    four: IPv4Interface
    six: IPv6Interface | None = None

    @property
    def all(self) -> list[IPv4Interface | IPv6Interface]:
        return [self.four] if self.six is None else [self.four, self.six]

    @property
    def subnets(self) -> list[Net]:
        return [one.network for one in self.all]

    def overlapped(self, other: Net) -> Net | None:
        return next((one for one in self.subnets if overlapping(one, other)), None)
