"""The host's nftables table `inet virtbus…` (NET-12).

The table masquerades the guests' traffic and limits the addresses that guests may reach.
"""

from collections.abc import Iterator
from ipaddress import IPv4Interface, IPv6Interface

from virtbus.netd.core import nft, nft_counters, nft_tables, reach_rules, redirected
from virtbus.netd.core.attachment import NicKind
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.reach import ReachRules

_DEFAULT_BRIDGE, _DEFAULT_TABLE = "virtbus0", "virtbus"
_FAMILY = nft.Family.INET
_PREROUTING, _LOCAL_IN, _FORWARD, _LOCAL_OUT, _POSTROUTING = 0, 1, 2, 3, 4
_BEFORE_REDIRECTS, _FILTER, _SOURCE_NAT = -110, 0, 100

_CLOSED = frozenset({NicKind.NAT, NicKind.OVERLAY})
"""Kinds whose guests accept connections from outside only at published ports."""

ROUTER = IPv6Interface("fe80::1/64")
"""The link-local address of every bridge with IPv6, and default router of its guests."""


def table_of(bridge: str) -> str:
    """Return the name of a bridge's table. Two netds on one host have different tables."""
    return _DEFAULT_TABLE if bridge == _DEFAULT_BRIDGE else f"{_DEFAULT_TABLE}_{bridge}"


def host_table(
    bridge: str,
    gateway: IPv4Interface,
    reach: ReachRules,
    kind: NicKind = NicKind.BRIDGE,
    gateway6: IPv6Interface | None = None,
) -> list[NetlinkCall]:
    """Return the transaction that replaces the table of a bridge.

    With `gateway6`, guests use IPv6 by the same rules. Without it, their IPv6 is dropped.

    An isolated network has the rules of `_isolated`. Traffic of a routed network is not
    masqueraded. Guests of a nat or overlay network accept connections from outside only at
    published ports. Packets to a gateway must come from its own bridge. Others are dropped before a
    published port of the host could redirect them.

    A guest may answer its host, query a name server, and ping the gateway. Nothing else of the host
    is open, unless a setting opens an address of the host. Of all other addresses, three groups are
    closed: metadata, the hosts of the fleet, and addresses that a setting closes.

    While the resolver is replaced or restarted, its port is closed. The kernel's error "port
    unreachable" would end a guest's lookup, so the error is dropped. Without an answer, the guest
    repeats its query.
    """
    if kind is NicKind.ISOLATED:
        return _isolated(bridge)
    drop, accept = nft.verdict(nft.NftVerdict.DROP), nft.verdict(nft.NftVerdict.ACCEPT)
    ipv4 = nft.is_ipv4()
    guest = (*nft.came_from(bridge), *ipv4)
    masquerade = nft.rule(
        "postrouting",
        ipv4,
        nft.ip_source_in(gateway.network),
        nft.goes_elsewhere_than(bridge),
        nft.masquerade(),
    )
    hosts, hosts6 = reach_rules.host_sets(reach)
    chains = [
        nft.Chain("prerouting", _PREROUTING, _BEFORE_REDIRECTS),
        nft.Chain("input", _LOCAL_IN, _FILTER),
        nft.Chain("forward", _FORWARD, _FILTER),
        nft.Chain("output", _LOCAL_OUT, _FILTER),
        nft.Chain("postrouting", _POSTROUTING, _SOURCE_NAT, kind="nat"),
    ]
    rules = [
        *_tunnels(kind, hosts),
        *_gateways(bridge, gateway, gateway6),
        *reach_rules.opened("input", guest, reach),
        reach_rules.pings("input", (*guest, *nft.ip_destination(gateway.ip))),
        *(_input6(bridge, gateway6, reach) if gateway6 is not None else []),
        nft.rule("input", nft.came_from(bridge), drop),
        *reach_rules.opened("forward", guest, reach),
        *reach_rules.closed("forward", guest, hosts, reach),
        nft.rule("forward", guest, accept),
        *(_forward6(bridge, gateway6, reach, hosts6) if gateway6 is not None else []),
        nft.rule("forward", nft.came_from(bridge), drop),
        nft.rule("forward", nft.goes_to(bridge), nft.established(), accept),
        *(_only_published(bridge) if kind in _CLOSED else []),
        nft.rule(
            "output",
            nft.goes_to(bridge),
            ipv4,
            nft.l4_protocol(nft.ICMP),
            nft.is_port_unreachable(),
            drop,
        ),
        *([] if kind is NicKind.ROUTED else [masquerade, *_masquerade6(bridge, gateway6)]),
    ]
    return nft_tables.replace_table(_FAMILY, table_of(bridge), chains, rules, [hosts, hosts6])


def _only_published(bridge: str) -> Iterator[nft.NftRule]:
    """Yield the rules for new connections to guests: only those to published ports pass.

    Connections that another program, such as kube-proxy, redirects to a guest are dropped.
    """
    to_guest, accept = nft.goes_to(bridge), nft.verdict(nft.NftVerdict.ACCEPT)
    yield nft.rule("forward", to_guest, redirected.is_redirected(), accept)
    yield nft.rule("forward", to_guest, nft.verdict(nft.NftVerdict.DROP))


def _gateways(
    bridge: str, gateway: IPv4Interface, gateway6: IPv6Interface | None
) -> Iterator[nft.NftRule]:
    """Yield the rules that open the gateways only to the bridge's own guests.

    Other senders are guests on a segment, whose packets no host has filtered, and machines with a
    route to a routed network. The rules in `input` drop packets whose destination another program
    has rewritten to a gateway.
    """
    elsewhere = (*nft.comes_from_elsewhere_than(bridge), *nft.comes_from_elsewhere_than("lo"))
    places = [(*nft.is_ipv4(), *nft.ip_destination(gateway.ip))]
    if gateway6 is not None:
        places.append((*nft.is_ipv6(), *nft.ip6_destination(gateway6.ip)))
    for chain in ("prerouting", "input"):
        for place in places:
            yield nft.rule(chain, elsewhere, place, nft.verdict(nft.NftVerdict.DROP))


def _tunnels(kind: NicKind, hosts: nft.AddressSet) -> Iterator[nft.NftRule]:
    """Yield the rules for frames of overlays: only hosts of the fleet may send them.

    A frame of a masqueraded guest reaches another host with the address of the guest's host, so the
    other host would accept it. This host therefore never forwards overlay frames to hosts, even if
    a setting opens the hosts to guests.
    """
    if kind is NicKind.OVERLAY:
        yield reach_rules.tunnel_frames("input", hosts)
    yield reach_rules.tunnel_frames("forward", hosts, *nft.ip_destination_among(hosts))


def _input6(bridge: str, gateway: IPv6Interface, reach: ReachRules) -> Iterator[nft.NftRule]:
    """Yield the rules that let a guest send answers, discovery and echo requests to its host."""
    guest = (*nft.came_from(bridge), *nft.is_ipv6())
    yield from reach_rules.opened6("input", guest, reach)
    yield from reach_rules.discovery("input", guest)
    for address in (gateway.ip, ROUTER.ip):
        yield reach_rules.pings6("input", (*guest, *nft.ip6_destination(address)))


def _forward6(
    bridge: str, gateway: IPv6Interface, reach: ReachRules, hosts: nft.AddressSet
) -> Iterator[nft.NftRule]:
    """Yield the rules for IPv6 from a guest to destinations other than its host.

    Packets to metadata, hosts and addresses that a setting closes are dropped.
    """
    guest = (*nft.came_from(bridge), *nft.is_ipv6())
    yield from reach_rules.opened6("forward", guest, reach)
    yield from reach_rules.closed6("forward", guest, hosts, reach)
    own, accept = nft.ip6_source_in(gateway.network), nft.verdict(nft.NftVerdict.ACCEPT)
    yield nft.rule("forward", guest, own, accept)


def _masquerade6(bridge: str, gateway: IPv6Interface | None) -> Iterator[nft.NftRule]:
    if gateway is not None:
        elsewhere = nft.goes_elsewhere_than(bridge)
        inside = (*nft.is_ipv6(), *nft.ip6_source_in(gateway.network))
        yield nft.rule("postrouting", inside, elsewhere, nft.masquerade())


def _isolated(bridge: str) -> list[NetlinkCall]:
    """Return the transaction for a bridge whose guests reach only each other.

    On some hosts, bridged packets pass the forward hook. One rule accepts them there.
    """
    drop, accept = nft.verdict(nft.NftVerdict.DROP), nft.verdict(nft.NftVerdict.ACCEPT)
    guest, to_guest = nft.came_from(bridge), nft.goes_to(bridge)
    chains = [nft.Chain("input", _LOCAL_IN, _FILTER), nft.Chain("forward", _FORWARD, _FILTER)]
    rules = [
        nft.rule("input", guest, drop),
        nft.rule("forward", guest, to_guest, accept),
        nft.rule("forward", guest, drop),
        nft.rule("forward", to_guest, drop),
    ]
    return nft_tables.replace_table(_FAMILY, table_of(bridge), chains, rules)


def has_host_table(bridge: str) -> NetlinkCall:
    """Return the query for the table."""
    return nft_tables.get_table(_FAMILY, table_of(bridge))


def list_host_rules(bridge: str) -> NetlinkCall:
    """Return the call that lists the rules of the table."""
    return nft_counters.list_rules(_FAMILY, table_of(bridge))


def no_host_table(bridge: str) -> list[NetlinkCall]:
    """Return the transaction that removes the table, if there is one."""
    return nft_tables.batch(nft_tables.ended(_FAMILY, table_of(bridge)))
