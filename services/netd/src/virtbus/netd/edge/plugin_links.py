"""Reads and changes the links that CNI plugins made in the namespaces of VMs.

The guest takes over the addresses of such a link. Before DEL, netd puts the addresses back on the
link, because plugins look for them. All methods block, and leave their thread in the VM's
namespace: call each in `in_thread`.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_interface,
)

from virtbus.netd.core import link_addresses
from virtbus.netd.core.attachment import Attachment, Nic, NicKind, Route
from virtbus.netd.core.cni_results import PluginLink
from virtbus.netd.edge import links
from virtbus.netd.edge.namespaces import OWN_NAMESPACE, Namespaces, opened, write_sysctl
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.whole_file import content

_ROUTES = "/proc/thread-self/net/route"
_ROUTES6 = "/proc/thread-self/net/ipv6_route"
_UP, _REJECT = 0x1, 0x200
_ADVERTISED, _ANYCAST, _LOCAL = 0x40000, 0x100000, 0x80000000
"""Flags `RTF_*` of routes from router advertisements, and of the kernel's routes to own addresses.
"""
_PAIRED = frozenset({"veth", "netkit"})
"""Kinds of links whose packets all go to a peer link."""


@dataclass(frozen=True, slots=True)
class PluginLinks:
    """The links of CNI interfaces in `namespaces`."""

    namespaces: Namespaces

    def find(self, attachment: Attachment, nic: Nic) -> PluginLink | None:
        with opened(OWN_NAMESPACE) as host:
            self.namespaces.enter(attachment.netns)
            with Netlink() as inside:
                link = links.describe(inside, nic.eth)
                if link is None:
                    return None
                found = links.list_addresses(inside, index=link.index)
                at_host = links.namespace_id(inside, host)
        own = [each.interface for each in found]
        addresses = [one for one in own if isinstance(one, IPv4Interface)]
        addresses6 = [one for one in own if isinstance(one, IPv6Interface)]
        routes6 = b""
        with suppress(FileNotFoundError):  # the kernel lacks IPv6
            routes6 = content(_ROUTES6)
        return PluginLink(
            kind=link.kind,
            mac=link.mac,
            mtu=link.mtu,
            addresses=tuple(str(each) for each in addresses),
            routes=(
                *routes_in(content(_ROUTES).decode(), nic.eth, addresses),
                *routes6_in(routes6.decode(), nic.eth, addresses6),
            ),
            to_host=link.kind in _PAIRED and link.peer_namespace == at_host,
        )

    def take_addresses_off(self, attachment: Attachment, nic: Nic, found: PluginLink) -> None:
        """Remove a link's IPv4 addresses and disable its IPv6. The guest has its addresses now."""
        self.namespaces.enter(attachment.netns)
        try:
            index = socket.if_nametoindex(nic.eth)
        except OSError:  # the link is gone
            return
        with Netlink() as inside:
            own = map(IPv4Interface, found.addresses)
            inside.do([link_addresses.delete_address(index, each) for each in own])
        write_sysctl(_no_ipv6(nic), "1")

    def give_addresses_back(self, attachment: Attachment) -> None:
        """Put MAC and addresses back on CNI interfaces, for the plugins' DEL.

        Replace a missing namespace by a new namespace, and a missing link by an empty bridge.
        """
        if self.namespaces.exists(attachment.netns):
            self.namespaces.enter(attachment.netns)
        else:
            self.namespaces.remove(attachment.netns)
            self.namespaces.make_and_enter(attachment.netns)
        with Netlink() as inside:
            for nic in attachment.nics:
                if nic.kind is NicKind.CNI:
                    _restore(inside, nic)


def routes_in(text: str, name: str, own: list[IPv4Interface]) -> Iterator[Route]:
    """Yield the routes of a link in the text of `/proc/net/route`.

    Skip routes to the networks of the link's `own` addresses and multicast routes: a guest adds
    them by itself. Also skip routes that only lead to a gateway: the DHCP offer adds them.
    """
    rows = [line.split() for line in text.splitlines()[1:]]
    found: list[tuple[IPv4Network, IPv4Address]] = []
    for row in rows:
        flags = int(row[3], 16)
        if row[0] == name and flags & _UP and not flags & _REJECT:
            found.append((IPv4Network((_address(row[1]), str(_address(row[7])))), _address(row[2])))
    gateways = {gateway for _, gateway in found if int(gateway)}
    for destination, gateway in found:
        on_link = not int(gateway)
        to_gateway = on_link and destination in {IPv4Network(each) for each in gateways}
        connected = on_link and any(destination == each.network for each in own)
        if not (destination.is_multicast or connected or to_gateway):
            yield Route(destination=str(destination), gateway="" if on_link else str(gateway))


def routes6_in(text: str, name: str, own: list[IPv6Interface]) -> Iterator[Route]:
    """Yield the plugins' routes of a link in the text of `/proc/net/ipv6_route`.

    Skip routes from router advertisements, and routes to the networks of the link's `own`
    addresses, to link-local networks and to multicast addresses.
    """
    unwanted = _REJECT | _ADVERTISED | _ANYCAST | _LOCAL
    for row in map(str.split, text.splitlines()):
        flags = int(row[8], 16)
        if row[9] != name or not flags & _UP or flags & unwanted:
            continue
        destination, gateway = _network6(row), IPv6Address(bytes.fromhex(row[4]))
        connected = not int(gateway) and any(destination == each.network for each in own)
        on_link = destination.is_link_local or destination.is_multicast
        if not (connected or on_link):
            yield Route(destination=str(destination), gateway=str(gateway) if int(gateway) else "")


def _network6(row: list[str]) -> IPv6Network:
    return IPv6Network((bytes.fromhex(row[0]), int(row[1], 16)))


def router_of(gateway: str) -> str:
    """Return the link-local address of the host's link with the IPv6 address `gateway`.

    Return an empty string if no link of the host has both addresses. Return a link-local or empty
    `gateway` unchanged. The thread must be in the host's namespace.
    """
    if not gateway or ip_address(gateway).is_link_local:
        return gateway
    with Netlink() as host:
        found = links.list_addresses(host, socket.AF_INET6)
    at = {each.index for each in found if str(each.interface.ip) == gateway}
    there = (each.interface.ip for each in found if each.index in at)
    return next((str(ip) for ip in there if ip.is_link_local), "")


def _no_ipv6(nic: Nic) -> str:
    return f"net/ipv6/conf/{nic.eth}/disable_ipv6"


def _address(word: str) -> IPv4Address:
    """`word`, from `/proc/net/route`, is in little-endian byte order."""
    return IPv4Address(bytes.fromhex(word)[::-1])


def _restore(inside: Netlink, nic: Nic) -> None:
    if links.find(inside, nic.eth) is None:
        inside.do([links.new_bridge(nic.eth)])
    inside.do([links.set_link(nic.eth, up=True, master=0, mac=nic.mac)])
    link = links.find(inside, nic.eth)
    if link is not None:
        write_sysctl(_no_ipv6(nic), "0")
        inside.do(
            [link_addresses.add_address(link.index, ip_interface(each)) for each in nic.addresses]
        )
