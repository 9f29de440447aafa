"""DHCP offers of a VM's interfaces, from their addresses, routes and DNS settings."""

from dataclasses import dataclass, replace
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)

from virtbus.netd.core import names
from virtbus.netd.core.attachment import WITH_NAMES, Attachment, Nic, NicKind
from virtbus.netd.core.dhcp import ANY, Offer
from virtbus.netd.core.dhcp6 import Offer6
from virtbus.netd.core.domain_names import domains
from virtbus.netd.core.host_table import ROUTER
from virtbus.netd.core.ipv6_frame import link_local_of
from virtbus.netd.core.masquerade import guest_side
from virtbus.schemas.dns import DnsConfig

LINK_LOCAL_SERVER = IPv4Address("169.254.254.1")
"""The DHCP server id on a network without a gateway. Unicast renewals do not reach this address, so
clients renew by broadcast after T2."""

_DEFAULT_ROUTE = IPv4Network("0.0.0.0/0")


@dataclass(frozen=True, slots=True)
class DhcpSettings:
    """DHCP settings for all guests of a node.

    The DNS of a VM, a network object or a CNI result may override servers and domains.
    """

    dns: tuple[IPv4Address, ...] = ()
    ntp: tuple[IPv4Address, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    lease_s: int = 3600


def offers_of(
    attachment: Attachment, site: DhcpSettings, names_domain: str = ""
) -> list[Offer | None]:
    """Return an offer for each interface, in order; None if netd does not answer DHCP there.

    Only the first interface with a gateway gives the guest a default route. `names_domain` is the
    domain of VMs' names, which the gateways of kinds in WITH_NAMES resolve. If empty, these
    gateways resolve no names.
    """
    offers: list[Offer | None] = []
    routed = False
    for nic in attachment.nics:
        if nic.on_segment:
            offers.append(None)  # a DHCP server of the segment answers
            continue
        resolved = names_domain if nic.kind in WITH_NAMES else ""
        around = replace(site, dns=()) if nic.kind is NicKind.ISOLATED else site
        # The guest queries netd's resolver, which queries the servers of the network.
        served = nic.model_copy(update={"dns": ()}) if resolved else nic
        named = _named(attachment, nic, around, resolved)
        routed_elsewhere = routed or not nic.gateway
        seen = guest_side(served, default=not routed_elsewhere)
        offer = _offer(attachment, seen, named, routed=routed_elsewhere)
        routed = routed or (offer is not None and offer.router is not None)
        offers.append(offer)
    return offers


@dataclass(frozen=True, slots=True)
class Offers:
    """The offers of one interface, by IP version. None means that netd makes no such offer."""

    four: Offer | None
    six: Offer6 | None = None


def all_offers(attachment: Attachment, site: DhcpSettings, names_domain: str = "") -> list[Offers]:
    """Return the offers of each interface, in order.

    For each IP version, only the first interface with a gateway gives the guest a default route.
    """
    found: list[Offers] = []
    routed = False
    fours = offers_of(attachment, site, names_domain)
    for nic, four in zip(attachment.nics, fours, strict=True):
        search = four.search if four is not None else domains(nic.search or site.search)
        six = _offer6(attachment, guest_side(nic), search, site.lease_s, routed=routed)
        routed = routed or (six is not None and six.router)
        found.append(Offers(four, six))
    return found


def _offer6(
    attachment: Attachment, nic: Nic, search: tuple[str, ...], lease_s: int, *, routed: bool
) -> Offer6 | None:
    if not nic.addresses6:
        return None
    own = attachment.dns_config
    server_mac = names.mac_bytes(names.server_mac(attachment.uid, nic.index))
    router = _router6(nic)
    six = [route for route in nic.routes if ":" in route.destination]
    servers = tuple(IPv6Address(server) for server in nic.dns if ":" in server)
    ways = (one.destination for one in six if router is not None and one.gateway == nic.gateway6)
    return Offer6(
        mac=names.mac_bytes(nic.mac),
        addresses=tuple(IPv6Interface(address) for address in nic.addresses6),
        server=router or link_local_of(server_mac),
        server_mac=server_mac,
        router=router is not None and not routed,
        dns=own.servers6 if own is not None else servers,
        search=own.searches if own is not None else search,
        mtu=nic.mtu,
        lease_s=lease_s,
        routes=tuple(map(IPv6Network, ways)),
        on_link=tuple(IPv6Network(one.destination) for one in six if not one.gateway),
    )


def _router6(nic: Nic) -> IPv6Address | None:
    """Return the address by which the guest knows its IPv6 router; None without a known router.

    A router of a CNI network that is not on this host advertises itself to the guest. netd does not
    need the address of such a router.
    """
    if nic.kind is NicKind.CNI:
        return IPv6Address(nic.router6) if nic.router6 else None
    if nic.of_segment:
        return IPv6Address(nic.gateway6) if nic.gateway6 else None
    return ROUTER.ip if nic.gateway6 else None


def _named(attachment: Attachment, nic: Nic, site: DhcpSettings, names_domain: str) -> DhcpSettings:
    """Return the settings for an interface whose gateway resolves VMs' names in `names_domain`.

    The gateway is the DNS server. By the search list, a guest finds VMs of its namespace by their
    short names. If `names_domain` is empty, return `site`.
    """
    if not names_domain:
        return site
    own = f"{attachment.namespace}.{names_domain}"
    return replace(
        site,
        dns=(IPv4Address(nic.gateway),),
        domain=site.domain or own,
        search=(own, *(site.search or (site.domain,))),
    )


def _dns(own: DnsConfig | None, nic: Nic, site: DhcpSettings) -> DhcpSettings:
    """Return the settings with the DNS of the VM; without one, with that of the network or node.

    A client that does not know option 119 (the search list) searches only in `domain`.
    """
    if own is not None:
        domain = next(iter(own.searches), "")
        return replace(site, dns=own.servers4, domain=domain, search=own.searches)
    servers = tuple(IPv4Address(server) for server in nic.dns if ":" not in server)
    return replace(
        site,
        dns=servers if nic.dns else site.dns,
        domain=next(iter(domains((nic.domain, site.domain))), ""),
        search=domains(nic.search or site.search),
    )


def _offer(attachment: Attachment, nic: Nic, site: DhcpSettings, *, routed: bool) -> Offer | None:
    if not nic.addresses4:
        return None
    gateway = IPv4Address(nic.gateway) if nic.gateway else None
    routes = [
        (IPv4Network(route.destination), IPv4Address(route.gateway) if route.gateway else ANY)
        for route in nic.routes
        if ":" not in route.destination
    ]
    dns = _dns(attachment.dns_config, nic, site)
    return Offer(
        mac=names.mac_bytes(nic.mac),
        address=IPv4Interface(nic.addresses4[0]),
        server=gateway or LINK_LOCAL_SERVER,
        server_mac=names.mac_bytes(names.server_mac(attachment.uid, nic.index)),
        router=None if routed else gateway,
        dns=dns.dns,
        ntp=site.ntp,
        domain=dns.domain,
        search=dns.search,
        hostname=attachment.vm_name,
        mtu=nic.mtu,
        routes=tuple(route for route in routes if route[0] != _DEFAULT_ROUTE),
        lease_s=site.lease_s,
    )
