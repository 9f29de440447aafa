"""Anti-spoofing filter of a guest's tap (NET-06), as nftables rules.

The filter is a chain at the tap's ingress, so it sees every frame before any bridge. All frames
that no rule allows are dropped. Examples are VLAN, STP and LLDP, and IPv6 of a guest without IPv6
addresses. The chain also drops DHCP requests and router solicitations of the guest, because netd's
packet socket on the tap reads them before this hook. All guests share the resolver's TCP listener,
so packets to it are limited in rate.

The kernel compares a frame with each rule up to the rule that decides. To save comparisons, the
first rules accept most TCP packets, which later rules would also accept.

This host does not route the frames of some guests: guests on a segment, and guests whose CNI
plugins made a link past the host. Their chains also drop packets to hosts of the fleet (ADR 0036).
If the network of a segment has no subnet, the guest gets its address from the segment's DHCP
server, to which it sends requests by broadcast.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from virtbus.netd.core import nft, nft_counters, nft_tables
from virtbus.netd.core.ipv6_frame import CLIENT6_PORT, SERVER6_PORT, link_local_of
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.reach import METADATA, METADATA6, ReachRules, of_ipv4, of_ipv6
from virtbus.netd.core.reach_rules import DNS_PORT, host_sets

TABLE = "virtbus"
_EXTENSIONS = (0, 43, 60, 135, 139, 140)
"""Extension headers of IPv6. A guest could hide neighbour discovery behind them (RFC 7113)."""
_ROUTER_SOLICITATION, _ROUTER_ADVERTISEMENT, _REDIRECT = 133, 134, 137
_NEIGHBOUR_SOLICITATION, _NEIGHBOUR_ADVERTISEMENT = 135, 136
_INGRESS = 0
_UNSPECIFIED, _UNSPECIFIED6 = IPv4Address(0), IPv6Address(0)
_DHCP_CLIENT_PORT, _DHCP_SERVER_PORT = 68, 67
_BROADCAST = IPv4Address("255.255.255.255")
_DNS_TCP_HZ = 200
"""Maximum number of packets a second from one guest to TCP port 53 of its gateway. This suffices
for 30 short queries, or for 500 KiB."""
_DHCP_HZ = 20
"""Maximum number of DHCP requests a second from one guest to servers of a segment. netd's own
server has the same limit."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap and the addresses that its guest may use.

    `gateway` is set if netd resolves names at this address.
    """

    name: str
    mac: str
    addresses: tuple[IPv4Address, ...]
    gateway: IPv4Address | None = None
    addresses6: tuple[IPv6Address, ...] = ()
    reach: ReachRules | None = None
    """Limits of the guest's reach; None if the host sees its packets and applies the limits."""
    on_segment: bool = False
    """True if the DHCP server of a segment gives the guest its address."""
    wire: str = ""
    """The link to a segment on which netd gives the guest its address; empty otherwise."""


Rules = list[tuple[str, tuple[bytes, ...]]]
"""Rules, each as the label of its counter (empty without a counter) and its expressions."""


def refusals(tap: Tap) -> list[str]:
    """Return the labels of a tap's counting rules, in order. A packet is counted at most once."""
    return [label for label, _ in _rules(tap) if label]


def _rules(tap: Tap) -> Rules:
    """Return the rules of a tap, which accept ARP and IP from its MAC and addresses.

    The last rule and the policy of the chain drop everything else. Dropped packets are counted.
    Three kinds are not counted: requests that netd answers (DHCP, DHCPv6, router solicitations),
    packets with extension headers of IPv6, and TCP above the resolver's limit.
    """
    raw = mac_bytes(tap.mac)
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    arp = nft.ether_type(nft.ETHERTYPE_ARP)
    # A guest checks its leased address by an ARP probe (RFC 5227), which has no sender address.
    probe = (_UNSPECIFIED,) if tap.addresses or tap.on_segment else ()
    return [
        *_first(tap),
        ("mac", (*nft.ether_source_is_not(raw), *refuse)),
        *(
            ("", (*arp, *nft.arp_sender(raw, address), accept))
            for address in (*tap.addresses, *probe)
        ),
        ("arp", (*arp, *refuse)),
        *(_segment(tap, tap.reach) if tap.on_segment and tap.reach else _bridged(tap)),
        *(_rules6(tap) if tap.addresses6 else []),
        ("protocol", refuse),
    ]


def _first(tap: Tap) -> Rules:
    """Return rules that accept TCP from the addresses of a guest whose reach is not limited.

    Fragments without a port do not match. TCP to port 53 does not match, because a later rule
    limits its rate.
    """
    if tap.on_segment or tap.reach is not None:
        return []
    mac = mac_bytes(tap.mac)
    ip = nft.ether_source_and_type(mac, nft.ETHERTYPE_IP)
    ip6 = nft.ether_source_and_type(mac, nft.ETHERTYPE_IPV6)
    tcp, tcp6 = nft.ip_protocol(nft.TCP), nft.ip6_protocol(nft.TCP)
    rest = *nft.destination_port(DNS_PORT, nft.NEQ), nft.verdict(nft.NftVerdict.ACCEPT)
    return [
        *(("", (*ip, *nft.ip_source(one), *tcp, *rest)) for one in tap.addresses),
        *(("", (*ip6, *nft.ip6_source(one), *tcp6, *rest)) for one in tap.addresses6),
    ]


def _bridged(tap: Tap) -> Rules:
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip, udp = nft.ether_type(nft.ETHERTYPE_IP), nft.ip_protocol(nft.UDP)
    return [
        ("", (*ip, *udp, *nft.destination_port(_DHCP_SERVER_PORT), refuse[-1])),
        ("dhcp", (*ip, *udp, *nft.source_port(_DHCP_SERVER_PORT), *refuse)),
        *([("", _too_many(tap.gateway))] if tap.gateway is not None else []),
        *(_limited(tap.addresses, tap.reach) if tap.reach is not None else []),
        *(("", (*ip, *nft.ip_source(address), accept)) for address in tap.addresses),
        ("address", (*ip, *refuse)),
    ]


def _limited(own: Sequence[IPv4Address], reach: ReachRules) -> Rules:
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip = nft.ether_type(nft.ETHERTYPE_IP)
    return [
        *(
            ("", (*ip, *nft.ip_source(address), *match, accept))
            for address in own
            for match in _opened(reach)
        ),
        *(("reach", (*ip, *match, *refuse)) for match in _closed(reach)),
    ]


def _limited6(own: Sequence[IPv6Address], reach: ReachRules) -> Rules:
    """Return the rules of `_limited` for IPv6, without name servers, whose addresses are IPv4."""
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip6 = nft.ether_type(nft.ETHERTYPE_IPV6)
    opened = [nft.ip6_destination_in(network) for network in of_ipv6(reach.opened)]
    closed = [
        nft.ip6_destination(METADATA6),
        *(nft.ip6_destination_in(network) for network in of_ipv6(reach.closed)),
        nft.ip6_destination_among(host_sets(reach)[1]),
    ]
    return [
        *(
            ("", (*ip6, *nft.ip6_source(address), *match, accept))
            for address in own
            for match in opened
        ),
        *(("reach", (*ip6, *match, *refuse)) for match in closed),
    ]


def _rules6(tap: Tap) -> Rules:
    """Return the rules of IPv6, for the guest's addresses and the link-local address of its MAC.

    Neighbour advertisements and checks for duplicates must be about one of these addresses. Router
    advertisements, redirects, DHCPv6 replies and extension headers are refused. Fragments pass:
    receivers drop neighbour discovery in fragments (RFC 6980).
    """
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip6 = nft.ether_type(nft.ETHERTYPE_IPV6)
    icmp, udp = (*ip6, *nft.ip6_protocol(nft.ICMP6)), (*ip6, *nft.ip6_protocol(nft.UDP))
    solicits = (*icmp, *nft.icmp6_type(_NEIGHBOUR_SOLICITATION))
    own = (*tap.addresses6, link_local_of(mac_bytes(tap.mac)))
    checks = (*solicits, *nft.ip6_source(_UNSPECIFIED6))
    advertises = (*icmp, *nft.icmp6_type(_NEIGHBOUR_ADVERTISEMENT))
    return [
        # This also drops reports of multicast membership (MLD), which no bridge of virtbus reads.
        *(("", (*ip6, *nft.ip6_protocol(header), refuse[-1])) for header in _EXTENSIONS),
        ("", (*icmp, *nft.icmp6_type(_ROUTER_SOLICITATION), refuse[-1])),
        ("ra", (*icmp, *nft.icmp6_type(_ROUTER_ADVERTISEMENT), *refuse)),
        ("redirect", (*icmp, *nft.icmp6_type(_REDIRECT), *refuse)),
        *(("", (*checks, *nft.nd_target(address), accept)) for address in own),
        *(
            ("", (*advertises, *nft.nd_target(target), *nft.ip6_source(source), accept))
            for target in own
            for source in own
        ),
        ("nd", (*advertises, *refuse)),
        ("", (*udp, *nft.destination_port(SERVER6_PORT), refuse[-1])),
        ("dhcp6", (*udp, *nft.source_port(SERVER6_PORT), *refuse)),
        *(_limited6(own, tap.reach) if tap.reach is not None else []),
        *(("", (*ip6, *nft.ip6_source(address), accept)) for address in own),
        ("address6", (*ip6, *refuse)),
    ]


def _segment(tap: Tap, reach: ReachRules) -> Rules:
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip, udp = nft.ether_type(nft.ETHERTYPE_IP), nft.ip_protocol(nft.UDP)
    asks = (
        *udp,
        *nft.source_port(_DHCP_CLIENT_PORT),
        *nft.destination_port(_DHCP_SERVER_PORT),
    )
    broadcast = (*nft.ip_destination(_BROADCAST), *asks)
    own = tap.addresses[:1]
    foreign = nft.ip_source_is_not(own[0]) if own else ()
    return [
        ("dhcp_flood", (*ip, *asks, nft.exceeds(_DHCP_HZ, _DHCP_HZ), *refuse)),
        *(
            ("", (*ip, *nft.ip_source(address), *broadcast, accept))
            for address in (*own, _UNSPECIFIED)
        ),
        ("dhcp", (*ip, *udp, *nft.source_port(_DHCP_SERVER_PORT), *refuse)),
        ("address", (*ip, *foreign, *refuse)),
        *(("", (*ip, *match, accept)) for match in _opened(reach)),
        *(("reach", (*ip, *match, *refuse)) for match in _closed(reach)),
        ("", (*ip, accept)),
    ]


def _opened(reach: ReachRules) -> list[tuple[bytes, ...]]:
    """Return the matches of packets that a guest may send even to closed addresses."""
    port = nft.destination_port(DNS_PORT)
    return [
        *(nft.ip_destination_in(network) for network in of_ipv4(reach.opened)),
        *(
            (*nft.ip_destination(server), *nft.ip_protocol(protocol), *port)
            for server in reach.dns
            for protocol in (nft.UDP, nft.TCP)
        ),
    ]


def _closed(reach: ReachRules) -> list[tuple[bytes, ...]]:
    return [
        nft.ip_destination(METADATA),
        *(nft.ip_destination_in(network) for network in of_ipv4(reach.closed)),
        nft.ip_destination_among(host_sets(reach)[0]),
    ]


def _too_many(gateway: IPv4Address) -> tuple[bytes, ...]:
    to_resolver = (
        *nft.ether_type(nft.ETHERTYPE_IP),
        *nft.ip_protocol(nft.TCP),
        *nft.ip_destination(gateway),
        *nft.destination_port(DNS_PORT),
    )
    drop = nft.verdict(nft.NftVerdict.DROP)
    return (*to_resolver, nft.exceeds(_DNS_TCP_HZ, _DNS_TCP_HZ), drop)


def _named(tap: Tap, rules: Rules) -> str:
    """Return a chain name with a hash of the rules and sets, so an outdated chain is not found."""
    content = b"".join(part for _, expressions in rules for part in expressions)
    if tap.reach is not None:
        for one in host_sets(tap.reach):
            content += b"".join(address.packed for address in one.addresses)
    return f"{tap.name}-{hashlib.sha256(content).hexdigest()[:12]}"


def _unheard() -> Rules:
    """Return the rules of a `wire`. They drop router advertisements and DHCP answers.

    A router advertisement would give the guest a further address, from the router's prefix.
    """
    drop = nft.verdict(nft.NftVerdict.DROP)
    ip, ip6 = nft.ether_type(nft.ETHERTYPE_IP), nft.ether_type(nft.ETHERTYPE_IPV6)
    udp, udp6 = nft.ip_protocol(nft.UDP), nft.ip6_protocol(nft.UDP)
    icmp6 = nft.ip6_protocol(nft.ICMP6)
    return [
        ("", (*ip, *udp, *nft.destination_port(_DHCP_CLIENT_PORT), drop)),
        ("", (*ip6, *udp6, *nft.destination_port(CLIENT6_PORT), drop)),
        ("", (*ip6, *icmp6, *nft.icmp6_type(_ROUTER_ADVERTISEMENT), drop)),
    ]


def guest_filters(taps: Sequence[Tap], *, replace: bool) -> list[NetlinkCall]:
    """Return one transaction that makes the table of a VM's namespace.

    `replace` removes an existing table first.
    """
    chains, rules = [], []
    for tap in taps:
        own = _rules(tap)
        name = _named(tap, own)
        chains.append(nft.Chain(name, _INGRESS, 0, policy=nft.NftVerdict.DROP, device=tap.name))
        rules += [nft.NftRule(name, expressions) for _, expressions in own]
        if tap.wire:
            chains.append(nft.Chain(tap.wire, _INGRESS, 0, device=tap.wire))
            rules += [nft.NftRule(tap.wire, expressions) for _, expressions in _unheard()]
    reaches = [tap.reach for tap in taps if tap.reach is not None]  # all are equal
    sets = host_sets(reaches[0]) if reaches else ()
    if replace:
        return nft_tables.replace_table(nft.Family.NETDEV, TABLE, chains, rules, sets)
    return nft_tables.new_table(nft.Family.NETDEV, TABLE, chains, rules, sets)


def list_rules(tap: Tap) -> NetlinkCall:
    """Return the call that lists the rules of `tap`, in order."""
    return nft_counters.list_rules(nft.Family.NETDEV, TABLE, _named(tap, _rules(tap)))


def list_wire_rules(tap: Tap) -> NetlinkCall:
    """Return the call that lists the rules of the tap's `wire`, in order."""
    return nft_counters.list_rules(nft.Family.NETDEV, TABLE, tap.wire)


def sent_wire_rules() -> list[bytes]:
    """Return the expressions of each rule of a `wire`, as they are sent."""
    return [b"".join(expressions) for _, expressions in _unheard()]


def sent_rules(tap: Tap) -> list[bytes]:
    """Return the expressions of each rule of the filter of `tap`, as they are sent."""
    return [b"".join(expressions) for _, expressions in _rules(tap)]


def has_table() -> NetlinkCall:
    """Return the query for the table in a namespace (ENOENT if there is none)."""
    return nft_tables.get_table(nft.Family.NETDEV, TABLE)


def has_chain(tap: Tap) -> NetlinkCall:
    """Return the query for the filter of `tap` with its current rules (ENOENT if there is none)."""
    return nft_tables.get_chain(nft.Family.NETDEV, TABLE, _named(tap, _rules(tap)))
