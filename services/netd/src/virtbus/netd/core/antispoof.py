"""Builds the anti-spoofing filter of a guest's tap (NET-06), as nftables rules.

The chain is attached to the tap's ingress, so it sees every frame before any bridge. It drops all
frames that no rule allows. So IPv6, VLAN, STP, LLDP and foreign sources need no rule of their own.
It also drops DHCP from the guest: netd's packet socket on the tap reads DHCP before this hook.
Packets to the resolver's TCP port are limited in rate, because all guests share its listener.

On a segment, the guest's frames reach other hosts without being routed by this one. So the chain
also drops packets to hosts of the fleet (ADR 0036). The guest asks the segment's DHCP server by
broadcast, and has the address that this server gives it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from virtbus.netd.core import nft, nft_counters, nft_tables
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.reach import METADATA, ReachRules

TABLE = "virtbus"
REFUSALS = ("mac", "arp", "dhcp", "address", "protocol")
_ON_SEGMENT = ("mac", "arp", "dhcp", "address", "reach", "reach", "protocol")
_HOSTS = "hosts"
_BROADCAST = IPv4Address("255.255.255.255")
_DHCP_CLIENT_PORT = 68
_INGRESS = 0
_UNSPECIFIED = IPv4Address(0)
_DHCP_SERVER_PORT = 67
_DNS_PORT = 53
_DNS_TCP_HZ = 200
"""Packets a second of one guest to TCP port 53 of its gateway: 30 short queries, or 500 KiB."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap and the addresses that its guest may use; `gateway` if netd resolves names there."""

    name: str
    mac: str
    addresses: tuple[IPv4Address, ...]
    gateway: IPv4Address | None = None
    reach: ReachRules | None = None
    """On a segment: the addresses that the guest may and may not reach."""

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return the names of the counting rules in their order.

        A packet is counted by the first that drops it.
        """
        if self.reach is None:
            return REFUSALS
        return (*_ON_SEGMENT[:5], *("reach" for _ in self.reach.closed), *_ON_SEGMENT[5:])


def _rules(tap: Tap) -> list[tuple[bytes, ...]]:
    """Return the rules of a tap, which accept ARP and IPv4 from its MAC and addresses.

    They drop and count everything else, in the order of `Tap.refusals`. The policy of the chain is
    drop, too. DHCP requests are not counted: netd answers them.
    """
    raw = mac_bytes(tap.mac)
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    arp = nft.ether_type(nft.ETHERTYPE_ARP)
    return [
        (*nft.ether_source_is_not(raw), *refuse),
        # An ARP probe (RFC 5227) carries no sender address; guests check their lease with it.
        *(
            (*arp, *nft.arp_sender(raw, address), accept)
            for address in (*tap.addresses, _UNSPECIFIED)
        ),
        (*arp, *refuse),
        *(_segment(tap, tap.reach) if tap.reach is not None else _bridged(tap)),
        refuse,
    ]


def _bridged(tap: Tap) -> list[tuple[bytes, ...]]:
    """Return the rules for IPv4 on a network of virtbus, whose host has rules about the reach."""
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip, udp = nft.ether_type(nft.ETHERTYPE_IP), nft.ip_protocol(nft.UDP)
    return [
        (*ip, *udp, *nft.destination_port(_DHCP_SERVER_PORT), refuse[-1]),
        (*ip, *udp, *nft.source_port(_DHCP_SERVER_PORT), *refuse),
        *([_too_many(tap.gateway)] if tap.gateway is not None else []),
        *((*ip, *nft.ip_source(address), accept) for address in tap.addresses),
        (*ip, *refuse),
    ]


def _segment(tap: Tap, reach: ReachRules) -> list[tuple[bytes, ...]]:
    """Return the rules for IPv4 on a segment."""
    accept = nft.verdict(nft.NftVerdict.ACCEPT)
    refuse = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
    ip, udp = nft.ether_type(nft.ETHERTYPE_IP), nft.ip_protocol(nft.UDP)
    asks = (
        *nft.ip_destination(_BROADCAST),
        *udp,
        *nft.source_port(_DHCP_CLIENT_PORT),
        *nft.destination_port(_DHCP_SERVER_PORT),
    )
    own = tap.addresses[:1]
    foreign = nft.ip_source_is_not(own[0]) if own else ()
    opened = [
        *(nft.ip_destination_in(network) for network in reach.opened),
        *(
            (
                *nft.ip_destination(server),
                *nft.ip_protocol(protocol),
                *nft.destination_port(_DNS_PORT),
            )
            for server in reach.dns
            for protocol in (nft.UDP, nft.TCP)
        ),
    ]
    closed = [
        nft.ip_destination(METADATA),
        *(nft.ip_destination_in(network) for network in reach.closed),
        nft.ip_destination_among(_hosts_of(reach)),
    ]
    return [
        *((*ip, *nft.ip_source(address), *asks, accept) for address in (*own, _UNSPECIFIED)),
        (*ip, *udp, *nft.source_port(_DHCP_SERVER_PORT), *refuse),
        (*ip, *foreign, *refuse),
        *((*ip, *match, accept) for match in opened),
        *((*ip, *match, *refuse) for match in closed),
        (*ip, accept),
    ]


def _hosts_of(reach: ReachRules) -> nft.AddressSet:
    return nft.AddressSet(_HOSTS, 1, tuple(sorted(reach.hosts)))


def _too_many(gateway: IPv4Address) -> tuple[bytes, ...]:
    to_resolver = (
        *nft.ether_type(nft.ETHERTYPE_IP),
        *nft.ip_protocol(nft.TCP),
        *nft.ip_destination(gateway),
        *nft.destination_port(_DNS_PORT),
    )
    drop = nft.verdict(nft.NftVerdict.DROP)
    return (*to_resolver, nft.exceeds(_DNS_TCP_HZ, _DNS_TCP_HZ), drop)


def _named(tap: Tap, rules: Sequence[Sequence[bytes]]) -> str:
    """Return a chain name with a hash of the rules, which replaces a comparison of the rules."""
    content = b"".join(part for expressions in rules for part in expressions)
    if tap.reach is not None:
        content += b"".join(address.packed for address in _hosts_of(tap.reach).addresses)
    return f"{tap.name}-{hashlib.sha256(content).hexdigest()[:12]}"


def guest_filters(taps: Sequence[Tap], *, replace: bool) -> list[NetlinkCall]:
    """Return one transaction that makes the table of a VM's namespace.

    `replace` removes an existing table first.
    """
    chains, rules = [], []
    for tap in taps:
        found = _rules(tap)
        name = _named(tap, found)
        chains.append(nft.Chain(name, _INGRESS, 0, policy=nft.NftVerdict.DROP, device=tap.name))
        rules += [nft.NftRule(name, expressions) for expressions in found]
    sets = {_hosts_of(tap.reach) for tap in taps if tap.reach is not None}  # all are equal
    if replace:
        return nft_tables.replace_table(nft.Family.NETDEV, TABLE, chains, rules, tuple(sets))
    return nft_tables.new_table(nft.Family.NETDEV, TABLE, chains, rules, tuple(sets))


def list_rules(tap: Tap) -> NetlinkCall:
    """Return the call that lists the rules of `tap`, in order."""
    return nft_counters.list_rules(nft.Family.NETDEV, TABLE, _named(tap, _rules(tap)))


def has_table() -> NetlinkCall:
    """Return the query for the table in a namespace (ENOENT if there is none)."""
    return nft_tables.get_table(nft.Family.NETDEV, TABLE)


def has_chain(tap: Tap) -> NetlinkCall:
    """Return the query for the filter of `tap` with these rules (ENOENT if there is none)."""
    return nft_tables.get_chain(nft.Family.NETDEV, TABLE, _named(tap, _rules(tap)))
