"""What a guest may send: the filter on its tap (NET-06), as nftables rules.

The chain hangs on the tap's ingress, so it sees every frame before any bridge, and drops what no
rule allows: IPv6, VLAN, STP, LLDP and foreign sources need no rule of their own. DHCP from the
guest is dropped too: netd's packet socket on the tap reads it before this hook.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address

from virtbus.netd.core import nft
from virtbus.netd.core.links import mac_bytes
from virtbus.netd.core.netlink import Call

TABLE = "virtbus"
_INGRESS = 0
_UNSPECIFIED = IPv4Address(0)
_DHCP_SERVER_PORT = 67


def guest_filter(
    tap: str, mac: str, addresses: Sequence[IPv4Address]
) -> tuple[nft.Chain, list[nft.Rule]]:
    """Chain and rules of one tap: only `mac`, only ARP and IPv4 of `addresses`."""
    raw = mac_bytes(mac)
    drop, accept = nft.verdict(nft.Verdict.DROP), nft.verdict(nft.Verdict.ACCEPT)
    arp, ip = nft.ether_type(nft.ETHERTYPE_ARP), nft.ether_type(nft.ETHERTYPE_IP)
    udp = nft.ip_protocol(nft.UDP)
    chain = nft.Chain(tap, _INGRESS, 0, policy=nft.Verdict.DROP, device=tap)
    rules = [nft.rule(tap, nft.ether_source_is_not(raw), drop)]
    # An ARP probe (RFC 5227) carries no sender address; guests check their lease with it.
    rules += [
        nft.rule(tap, arp, nft.arp_sender(raw, address), accept)
        for address in (*addresses, _UNSPECIFIED)
    ]
    rules += [
        nft.rule(tap, ip, udp, nft.destination_port(_DHCP_SERVER_PORT), drop),
        nft.rule(tap, ip, udp, nft.source_port(_DHCP_SERVER_PORT), drop),
    ]
    rules += [nft.rule(tap, ip, nft.ip_source(address), accept) for address in addresses]
    return chain, rules


def guest_filters(
    taps: Sequence[tuple[str, str, Sequence[IPv4Address]]], *, replace: bool
) -> list[Call]:
    """The whole table of a VM's namespace for its (tap, mac, addresses)."""
    parts = [guest_filter(*tap) for tap in taps]
    make = nft.replace_table if replace else nft.new_table
    return make(
        nft.Family.NETDEV,
        TABLE,
        [chain for chain, _rules in parts],
        [each for _chain, rules in parts for each in rules],
    )


def has_table() -> Call:
    """Ask the kernel whether the namespace has a filter already."""
    return nft.get_table(nft.Family.NETDEV, TABLE)
