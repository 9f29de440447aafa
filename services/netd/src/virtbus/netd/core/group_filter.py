"""Rules of security groups in a VM's namespace, as nftables tables (ADR 0069).

The tables are separate from the anti-spoofing filter. They exist only while a group or a network
isolates an interface. IP packets on the inner bridge pass the hooks of IP (`br_netfilter`), so the
kernel tracks their connections.

The rules compare each packet by the addresses and the port of its connection's first packet. One
rule is therefore enough for the packets of both directions. A connection ends when no rule allows
it any more.

A marked connection was opened by the guest. A chain on the tap marks the packets of the guest,
because the addresses of a packet do not prove the sender.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from virtbus.netd.core import nft, nft_counters, nft_tables
from virtbus.netd.core import nft_connections as ct
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.schemas.security_group import Direction, IpProtocol, SecurityRule, port_range

TABLE = "virtbus_groups"
STATE = "state"
"""The label for dropped packets that belong to no connection.

Other dropped packets are counted by the direction of their connection.
"""
_PREROUTING, _FORWARD, _INGRESS = 0, 2, 0
_RAW, _FILTER, _AFTER_ANTISPOOF = -300, 0, 1
_OPENED_BY_GUEST = 1
_NUMBERS = {
    IpProtocol.TCP: (nft.TCP,),
    IpProtocol.UDP: (nft.UDP,),
    IpProtocol.ICMP: (nft.ICMP, nft.ICMP6),
}
_NEIGHBOURS = (130, 137), (143, 143)
"""Ranges of types of ICMPv6: membership of multicast groups, routers, neighbours, redirects.
These messages belong to no connection; the anti-spoofing filter decides about them."""
_DHCP = (67, 68), (68, 67), (546, 547), (547, 546)
"""Source and destination ports of DHCP, on segments."""

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class PeerRule:
    """A rule with the addresses of the groups that it names."""

    rule: SecurityRule
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupedNic:
    """An interface. In its `isolated` directions, it has only connections that a rule allows."""

    index: int
    eth: str
    bridge: str
    tap: str
    isolated: frozenset[Direction]
    rules: tuple[PeerRule, ...] = ()
    on_segment: bool = False
    is_translated: bool = False
    """True if its packets are routed, not bridged, between `bridge` and `eth`."""

    @property
    def ways_in(self) -> tuple[str, ...]:
        """The links on which packets from the guest or to the guest arrive."""
        return (self.bridge, self.eth) if self.is_translated else (self.bridge,)

    @property
    def entry(self) -> str:
        return f"nic{self.index}"

    def chain(self, direction: Direction) -> str:
        return f"{direction}{self.index}"


def peer_rule(rule: SecurityRule, addresses: Sequence[str]) -> PeerRule:
    """Return a rule with the addresses of its groups. Invalid addresses are left out."""
    return PeerRule(rule, tuple(sorted(_parsed(addresses), key=lambda one: (one.version, one))))


def _parsed(texts: Sequence[str]) -> set[Address]:
    found = set()
    for one in texts:
        try:
            found.add(ip_address(one))
        except ValueError:
            continue
    return found


def sets_of(nics: Sequence[GroupedNic]) -> list[nft.AddressSet]:
    """Return the sets of addresses of the peers: two for each rule that names a group."""
    return [one for nic in nics for pair in _sets(nic).values() for one in pair]


def _sets(nic: GroupedNic) -> dict[int, tuple[nft.AddressSet, nft.AddressSet]]:
    """Return the sets of IPv4 and of IPv6 by the position of each rule that names a group."""
    found = {}
    for position, one in enumerate(nic.rules):
        if one.rule.groups:
            four, six = (
                nft.AddressSet(
                    f"{nic.entry}-{position}-{version}",
                    1 + (nic.index * 4096 + position) * 2 + version // 6,
                    tuple(address for address in one.addresses if address.version == version),
                    version,
                )
                for version in (4, 6)
            )
            found[position] = (four, six)
    return found


def _chains(nics: Sequence[GroupedNic]) -> Iterator[tuple[nft.Chain, list[nft.NftRule]]]:
    """Yield the chains of the inet table with their rules.

    A chain follows the chains to which its rules lead.
    """
    track, forward = nft.Chain("track", _PREROUTING, _RAW), nft.Chain("forward", _FORWARD, _FILTER)
    yield (
        track,
        [
            nft.rule("track", nft.came_from(link), ct.track_in_zone(1 + nic.index))
            for nic in nics
            for link in nic.ways_in
        ],
    )
    for nic in nics:
        for direction in Direction:
            yield from _connections(nic, direction)
        yield nft.Chain(nic.entry), _entry(nic)
    yield (
        forward,
        [
            nft.rule("forward", nft.came_from(link), ct.go_to(nic.entry))
            for nic in nics
            for link in nic.ways_in
        ],
    )


def _entry(nic: GroupedNic) -> list[nft.NftRule]:
    accept, drop = nft.verdict(nft.NftVerdict.ACCEPT), nft.verdict(nft.NftVerdict.DROP)
    by_guest = ct.mark_connection(_OPENED_BY_GUEST)
    icmp6 = *nft.is_ipv6(), *nft.l4_protocol(nft.ICMP6)
    dhcp = _DHCP if nic.on_segment else ()
    parts: list[Sequence[bytes]] = [
        (*ct.is_new(), *ct.is_marked(_OPENED_BY_GUEST), *by_guest),
        ct.mark_packet(0),  # rules of the host's interface below a macvlan must see no mark
        *((*icmp6, *ct.icmp6_types(*types), accept) for types in _NEIGHBOURS),
        *(
            (*nft.l4_protocol(nft.UDP), *nft.source_port(one), *nft.destination_port(other), accept)
            for one, other in dhcp
        ),
        (*ct.is_invalid(), nft.counter(), drop),
        (*ct.of_marked_connection(_OPENED_BY_GUEST), ct.go_to(nic.chain(Direction.EGRESS))),
        (ct.go_to(nic.chain(Direction.INGRESS)),),
    ]
    return [nft.rule(nic.entry, part) for part in parts]


def _connections(
    nic: GroupedNic, direction: Direction
) -> Iterator[tuple[nft.Chain, list[nft.NftRule]]]:
    """Yield the chains for the connections in a direction.

    A chain follows the chains to which its rules jump.
    """
    name, accept = nic.chain(direction), nft.verdict(nft.NftVerdict.ACCEPT)
    if direction not in nic.isolated:
        yield nft.Chain(name), [nft.rule(name, accept)]
        return
    rules: list[nft.NftRule] = []
    sets = _sets(nic)
    for position, one in enumerate(nic.rules):
        if one.rule.direction is not direction:
            continue
        peers = [*_peers(one.rule, sets.get(position, ()))]
        if len(peers) == 1:
            rules += [nft.rule(name, match, peers[0], accept) for match in _matches(one.rule)]
            continue
        # The peers get a chain. Without it, each pair of a port and a peer would need a rule.
        inner = f"{name}-{position}"
        yield nft.Chain(inner), [nft.rule(inner, peer, accept) for peer in peers]
        rules += [nft.rule(name, match, ct.jump_to(inner)) for match in _matches(one.rule)]
    drop = nft.verdict(nft.NftVerdict.DROP)
    yield nft.Chain(name), [*rules, nft.rule(name, nft.counter(), drop)]


def _matches(rule: SecurityRule) -> Iterator[Sequence[bytes]]:
    if rule.protocol is IpProtocol.ANY:
        yield ()
        return
    for number in _NUMBERS[rule.protocol]:
        if not rule.ports:
            yield ct.opened_with(number)
        for ports in rule.ports:
            yield (*ct.opened_with(number), *ct.opened_to_ports(*port_range(ports)))


def _peers(rule: SecurityRule, sets: Sequence[nft.AddressSet]) -> Iterator[Sequence[bytes]]:
    inward = rule.direction is Direction.INGRESS
    if not rule.cidrs and not rule.groups:
        yield ()
    for cidr in rule.cidrs:
        network = ip_network(cidr)
        yield ct.opened_by(network) if inward else ct.opened_to(network)
    for one in sets:
        yield ct.opened_by_one_of(one) if inward else ct.opened_to_one_of(one)


def _frames(nics: Sequence[GroupedNic]) -> Iterator[tuple[nft.Chain, list[nft.NftRule]]]:
    """Yield the netdev chains: one marks the guest's packets, one drops what IP rules cannot see.

    Rules of IP do not see a packet behind a VLAN tag. A guest may accept such packets if they have
    a priority tag.
    """
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    for nic in nics:
        out = nft.Chain(f"from-{nic.tap}", _INGRESS, _AFTER_ANTISPOOF, device=nic.tap)
        yield out, [nft.rule(out.name, ct.mark_packet(_OPENED_BY_GUEST))]
        policy = nft.NftVerdict.DROP
        inward = nft.Chain(f"to-{nic.tap}", _INGRESS, _FILTER, policy=policy, device=nic.eth)
        kinds = nft.ETHERTYPE_ARP, nft.ETHERTYPE_IP, nft.ETHERTYPE_IPV6
        yield inward, [nft.rule(inward.name, nft.ether_type(kind), accept) for kind in kinds]


def _named(nics: Sequence[GroupedNic]) -> str:
    """Return a chain name with a hash of all rules, without the addresses in the sets."""
    parts = [*_chains(nics), *_frames(nics)]
    content = hashlib.sha256(repr(_links(nics)).encode())
    for chain, rules in parts:
        content.update(chain.name.encode())
        for rule in rules:
            content.update(b"".join(rule.expressions))
    return f"rules-{content.hexdigest()[:12]}"


def _links(nics: Sequence[GroupedNic]) -> list[tuple[str, str, str]]:
    return [(nic.eth, nic.bridge, nic.tap) for nic in nics]


def group_tables(nics: Sequence[GroupedNic]) -> list[NetlinkCall]:
    """Return one transaction that makes or replaces the tables of a VM's namespace."""
    inet, frames = [*_chains(nics)], [*_frames(nics)]
    chains = [nft.Chain(_named(nics)), *(chain for chain, _ in inet)]
    rules = [rule for _, some in inet for rule in some]
    family, netdev = nft.Family.INET, nft.Family.NETDEV
    calls = [
        *nft_tables.ended(family, TABLE),
        *nft_tables.ended(netdev, TABLE),
        *nft_tables.contents(family, TABLE, chains, rules, sets_of(nics)),
        *nft_tables.contents(
            netdev,
            TABLE,
            [chain for chain, _ in frames],
            [one for _, some in frames for one in some],
        ),
    ]
    return nft_tables.batch(calls)


def closed_tables(nics: Sequence[GroupedNic]) -> list[NetlinkCall]:
    """Return one transaction that closes interfaces, for a kernel that cannot track connections.

    Only ARP passes. Netdev chains work without the hooks of IP.
    """
    inet, netdev = nft.Family.INET, nft.Family.NETDEV
    drop, arp = nft.NftVerdict.DROP, nft.ether_type(nft.ETHERTYPE_ARP)
    chains = [
        nft.Chain(f"closed-{link}", _INGRESS, _AFTER_ANTISPOOF, policy=drop, device=link)
        for nic in nics
        for link in (nic.tap, nic.eth)
    ]
    rules = [nft.rule(one.name, arp, nft.verdict(nft.NftVerdict.ACCEPT)) for one in chains]
    calls = [
        *nft_tables.ended(inet, TABLE),
        *nft_tables.ended(netdev, TABLE),
        *nft_tables.contents(inet, TABLE, [nft.Chain(_closed(nics))], []),
        *nft_tables.contents(netdev, TABLE, chains, rules),
    ]
    return nft_tables.batch(calls)


def has_closed(nics: Sequence[GroupedNic]) -> NetlinkCall:
    """Return the query for the chain that exists only while these interfaces are closed."""
    return nft_tables.get_chain(nft.Family.INET, TABLE, _closed(nics))


def _closed(nics: Sequence[GroupedNic]) -> str:
    return f"closed-{hashlib.sha256(repr(_links(nics)).encode()).hexdigest()[:12]}"


def no_tables() -> list[NetlinkCall]:
    """Return one transaction that removes the tables."""
    families = nft.Family.INET, nft.Family.NETDEV
    return nft_tables.batch([call for one in families for call in nft_tables.ended(one, TABLE)])


def has_table() -> NetlinkCall:
    """Return the query for the table in a namespace (ENOENT if there is none)."""
    return nft_tables.get_table(nft.Family.INET, TABLE)


def has_rules(nics: Sequence[GroupedNic]) -> NetlinkCall:
    """Return the query for the chain that exists only with these rules (ENOENT otherwise)."""
    return nft_tables.get_chain(nft.Family.INET, TABLE, _named(nics))


def list_members(one: nft.AddressSet) -> NetlinkCall:
    """Return the call that lists the addresses in a set."""
    return nft_tables.list_elements(nft.Family.INET, TABLE, one)


def changed_members(changes: Sequence[tuple[nft.AddressSet, set[bytes]]]) -> list[NetlinkCall]:
    """Return one transaction that corrects the sets in the kernel; empty if all are right.

    `changes` has each set with the packed addresses that the kernel's set has.
    """
    calls = [
        call
        for one, there in changes
        for call in nft_tables.changed_elements(nft.Family.INET, TABLE, one, there)
    ]
    return nft_tables.batch(calls) if calls else []


def counting(nic: GroupedNic) -> dict[str, NetlinkCall]:
    """Return the calls that list the chains with counters, by the label of the counter."""
    chains = {STATE: nic.entry} | {str(one): nic.chain(one) for one in nic.isolated}
    return {
        what: nft_counters.list_rules(nft.Family.INET, TABLE, chain)
        for what, chain in sorted(chains.items())
    }
