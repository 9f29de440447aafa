"""The addresses that guests may and may not reach.

A guest reaches other guests and the outside. A host of the fleet or a server of the bus is
reachable only if a setting opens its address (NET-12, ADR 0036).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from virtbus.schemas.ip_types import Address as Address
from virtbus.schemas.ip_types import Net

METADATA = IPv4Address("169.254.169.254")
"""Address of the host's own cloud metadata, which contains credentials that no guest may read."""
METADATA6 = IPv6Address("fd00:ec2::254")
MAX_ADDRESSES = 8192
"""Maximum number of hosts' addresses, more than any fleet has.

A longer list is cut, with an error in the log.
"""


@dataclass(frozen=True, slots=True)
class ReachRules:
    """The addresses in a host's nftables table."""

    hosts: frozenset[Address] = frozenset()
    """Addresses of the fleet's hosts and of the bus' servers."""
    closed: tuple[Net, ...] = ()
    opened: tuple[Net, ...] = ()
    """Takes precedence over `hosts` and `closed`."""
    dns: tuple[IPv4Address, ...] = ()
    """Name servers of guests. Port 53 of these addresses is open, even if the address is closed."""


def of_ipv4(networks: Iterable[Net]) -> list[IPv4Network]:
    """Return the networks of IPv4."""
    return [one for one in networks if isinstance(one, IPv4Network)]


def of_ipv6(networks: Iterable[Net]) -> list[IPv6Network]:
    """Return the networks of IPv6."""
    return [one for one in networks if isinstance(one, IPv6Network)]


def usable(texts: Iterable[str], guests: Sequence[Net]) -> frozenset[Address]:
    """Return the valid addresses of hosts among `texts`.

    Addresses within the guests' own subnets are ignored. All hosts have the same gateway address
    there, and a guest would be disconnected if its address were in the list.
    """
    found = set[Address]()
    for text in texts:
        try:
            address = ip_address(text)
        except ValueError:
            continue
        if is_host(address) and not any(address in subnet for subnet in guests):
            found.add(address)
        if len(found) == MAX_ADDRESSES:
            break
    return frozenset(found)


def is_host(address: Address) -> bool:
    """Return True for an address by which others can reach a host."""
    return not (
        address.is_loopback
        or address.is_unspecified
        or address.is_multicast
        or address.is_link_local
        or (isinstance(address, IPv4Address) and int(address) == 2**32 - 1)
    )
