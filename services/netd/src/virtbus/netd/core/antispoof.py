"""Builds the anti-spoofing filter of a guest's tap (NET-06), as nftables rules.

The chain hangs on the tap's ingress, so it sees every frame before any bridge. It drops frames
that no rule allows: IPv6, VLAN, STP, LLDP and foreign sources need no rule of their own. DHCP from
the guest is dropped too: netd's packet socket on the tap reads it before this hook.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from virtbus.netd.core import nft
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.netlink import NetlinkCall

TABLE = "virtbus"
_INGRESS = 0
_UNSPECIFIED = IPv4Address(0)
_DHCP_SERVER_PORT = 67


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap and the addresses that its guest may use."""

    name: str
    mac: str
    addresses: tuple[IPv4Address, ...]


def _rules(tap: Tap) -> list[tuple[bytes, ...]]:
    """Only the tap's MAC, only ARP and IPv4 of its addresses; the chain drops all else."""
    raw = mac_bytes(tap.mac)
    drop, accept = nft.verdict(nft.NftVerdict.DROP), nft.verdict(nft.NftVerdict.ACCEPT)
    arp, ip = nft.ether_type(nft.ETHERTYPE_ARP), nft.ether_type(nft.ETHERTYPE_IP)
    udp = nft.ip_protocol(nft.UDP)
    return [
        (*nft.ether_source_is_not(raw), drop),
        # An ARP probe (RFC 5227) carries no sender address; guests check their lease with it.
        *(
            (*arp, *nft.arp_sender(raw, address), accept)
            for address in (*tap.addresses, _UNSPECIFIED)
        ),
        (*ip, *udp, *nft.destination_port(_DHCP_SERVER_PORT), drop),
        (*ip, *udp, *nft.source_port(_DHCP_SERVER_PORT), drop),
        *((*ip, *nft.ip_source(address), accept) for address in tap.addresses),
    ]


def _named(tap: Tap, rules: Sequence[Sequence[bytes]]) -> str:
    """A name that changes with the rules: a chain that is there needs no comparing."""
    content = b"".join(part for expressions in rules for part in expressions)
    return f"{tap.name}-{hashlib.sha256(content).hexdigest()[:12]}"


def guest_filters(taps: Sequence[Tap], *, replace: bool) -> list[NetlinkCall]:
    """The whole table of a VM's namespace, in one transaction."""
    make = nft.replace_table if replace else nft.new_table
    chains, rules = [], []
    for tap in taps:
        found = _rules(tap)
        name = _named(tap, found)
        chains.append(nft.Chain(name, _INGRESS, 0, policy=nft.NftVerdict.DROP, device=tap.name))
        rules += [nft.NftRule(name, expressions) for expressions in found]
    return make(nft.Family.NETDEV, TABLE, chains, rules)


def has_table() -> NetlinkCall:
    """Ask the kernel whether the namespace has a filter already."""
    return nft.get_table(nft.Family.NETDEV, TABLE)


def has_chain(tap: Tap) -> NetlinkCall:
    """Ask the kernel whether the filter of `tap` is there, with these very rules."""
    return nft.get_chain(nft.Family.NETDEV, TABLE, _named(tap, _rules(tap)))
