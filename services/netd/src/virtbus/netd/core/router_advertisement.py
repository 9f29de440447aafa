"""Router advertisements for one guest (RFC 4861, RFC 4191).

They make the guest request its addresses by DHCPv6 (flags M and O), and announce its subnet as
on-link. No prefix permits autoconfiguration, because the guest would choose an address that netd
did not assign.
"""

import struct
from ipaddress import IPv6Network

from virtbus.netd.core.dhcp6 import Offer6

ROUTER_SOLICITATION, ROUTER_ADVERTISEMENT = 133, 134
EVERY_S = 600.0
"""The interval of unsolicited advertisements. They renew the router's lifetime."""
_LIFETIME_S, _LIFETIME_MAX_S = 9000, 65_535
"""The shortest and the longest lifetime of the router. Between these bounds, it is the lifetime of
the DHCP lease, so that a guest keeps its default route while netd is away."""
_MANAGED, _OTHER = 0x80, 0x40
_ON_LINK = 0x80
_PREFIX, _MTU, _ROUTE = 3, 5, 24
_HOP_LIMIT = 64


def advertisement(offer: Offer6) -> bytes:
    """Return the ICMPv6 message, with a checksum of zero."""
    lifetime_s = min(max(_LIFETIME_S, offer.lease_s), _LIFETIME_MAX_S)
    head = struct.pack(
        "!BBHBBHII",
        *(ROUTER_ADVERTISEMENT, 0, 0, _HOP_LIMIT, _MANAGED | _OTHER),
        *(lifetime_s if offer.router else 0, 0, 0),
    )
    subnets = dict.fromkeys((*(one.network for one in offer.addresses), *offer.on_link))
    mtu = struct.pack("!BBHI", _MTU, 1, 0, offer.mtu)
    prefixes = b"".join(_prefix(subnet, lifetime_s) for subnet in subnets)
    return head + mtu + prefixes + b"".join(_route(one, lifetime_s) for one in offer.routes)


def _prefix(subnet: IPv6Network, lifetime_s: int) -> bytes:
    fields = struct.pack("!BBBBIII", _PREFIX, 4, subnet.prefixlen, _ON_LINK, lifetime_s, 0, 0)
    return fields + subnet.network_address.packed


def _route(network: IPv6Network, lifetime_s: int) -> bytes:
    fields = struct.pack("!BBBBI", _ROUTE, 3, network.prefixlen, 0, lifetime_s)
    return fields + network.network_address.packed
