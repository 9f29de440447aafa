"""Netlink messages about routes of the main table."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_REPLACE,
    NetlinkCall,
    attr,
    find_attr,
)

_AF_UNSPEC, _AF_INET, _AF_INET6 = 0, 2, 10
_NEW, _GET = 24, 26
_ROUTE = struct.Struct("=BBBBBBBBI")
_MAIN, _STATIC, _UNICAST = 254, 4, 1
_EVERYWHERE, _ON_LINK = 0, 253
"""Scopes of routes."""
_GATEWAY_ON_LINK = 4
"""`RTNH_F_ONLINK`: the gateway is a neighbour, even outside of the link's subnets."""
_DESTINATION, _LINK, _GATEWAY = 1, 4, 5
_ALL = {4: "0.0.0.0/0", 6: "::/0"}


@dataclass(frozen=True, slots=True)
class KernelRoute:
    """A route through the link `index`. Without a gateway, the destination is on the link."""

    destination: IPv4Network | IPv6Network
    gateway: IPv4Address | IPv6Address | None
    index: int


def default_routes(gateways: Iterable[str], index: int) -> list[KernelRoute]:
    """Return a default route through the link `index` for each gateway that is not empty."""
    found = [ip_address(one) for one in gateways if one]
    return [KernelRoute(ip_network(_ALL[one.version]), one, index) for one in found]


def put_route(route: KernelRoute) -> NetlinkCall:
    """Return the call that makes a route, or replaces the route to the same destination."""
    four = route.destination.version == 4
    gateway = route.gateway
    scope = _ON_LINK if four and gateway is None else _EVERYWHERE
    body = _ROUTE.pack(
        *(_AF_INET if four else _AF_INET6, route.destination.prefixlen, 0, 0),
        *(_MAIN, _STATIC, scope, _UNICAST, _GATEWAY_ON_LINK if gateway is not None else 0),
    )
    if route.destination.prefixlen:
        body += attr(_DESTINATION, route.destination.network_address.packed)
    body += attr(_LINK, struct.pack("=I", route.index))
    body += attr(_GATEWAY, gateway.packed) if gateway is not None else b""
    name = f"put route {route.destination}"
    return NetlinkCall(name, _NEW, NLM_F_CREATE | NLM_F_REPLACE, body)


def list_routes() -> NetlinkCall:
    """Return the call that lists the routes of the namespace."""
    body = _ROUTE.pack(_AF_UNSPEC, *(0,) * 8)
    return NetlinkCall("list routes", _GET, NLM_F_DUMP, body, acked=False)


def listed_route(message: bytes) -> KernelRoute | None:
    """Return the route in one message of a list; None for a kind that `put_route` does not make."""
    family, length, *_, table, _protocol, _scope, kind, _flags = _ROUTE.unpack_from(
        message, HEADER_BYTES
    )
    at = HEADER_BYTES + _ROUTE.size
    link = find_attr(message, at, _LINK)
    if (table, kind) != (_MAIN, _UNICAST) or family not in {_AF_INET, _AF_INET6} or not link:
        return None
    destination = find_attr(message, at, _DESTINATION) or bytes(4 if family == _AF_INET else 16)
    gateway = find_attr(message, at, _GATEWAY)
    return KernelRoute(
        ip_network((destination, length)),
        ip_address(gateway) if gateway else None,
        struct.unpack("=I", link)[0],
    )
