"""Decides from which addresses images may be fetched: public addresses, and addresses in a setting.

An address is not public if IANA's special-purpose registries list it as not globally reachable, if
it is multicast or reserved, or if Azure's metadata service has it. If an IPv6 address leads to an
IPv4 address (mapped, NAT64, 6to4), the IPv4 address is checked.
"""

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC_V4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata service
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's metadata service, though the address is public
        "169.254.0.0/16",  # link-local; the metadata service of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata service
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays, deprecated
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
"""Global unicast. Loopback, link-local, unique local and multicast addresses are outside it."""
_NOT_PUBLIC_V6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def refusal(address: str, allowed: Iterable[Network]) -> str:
    """Return the reason why nothing may be fetched from a numeric address; empty if allowed."""
    asked = ipaddress.ip_address(address.partition("%")[0])
    meant = _meant(asked)
    if any(ip in network for ip in (asked, meant) for network in allowed):
        return ""
    if _is_public(meant):
        return ""
    return f"{asked} is no public address, and the setting image_addresses does not name it"


def _meant(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address leads to, otherwise `address` itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _UNICAST_V6 and not any(address in network for network in _NOT_PUBLIC_V6)
