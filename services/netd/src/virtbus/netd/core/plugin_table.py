"""The host's nftables table about the guests that CNI plugins connect (NET-12).

Packets of these guests come in by links that the plugins choose, so the table matches guests by
their addresses. The filter of a guest's tap lets the guest use no other addresses.
"""

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_interface

from virtbus.netd.core import nft, nft_counters, nft_tables, reach_rules
from virtbus.netd.core.attachment import Nic, NicKind
from virtbus.netd.core.host_table import table_of
from virtbus.netd.core.ipv6_frame import link_local_of
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.reach import ReachRules

_FAMILY = nft.Family.INET
_LOCAL_IN, _FORWARD = 1, 2
_FILTER = 0

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class PluginGuests:
    """The addresses of guests, and of the gateways and name servers that plugins gave them."""

    guests: frozenset[Address] = frozenset()
    gateways: frozenset[Address] = frozenset()
    servers: frozenset[Address] = frozenset()


def plugin_guests(nics: Iterable[Nic]) -> PluginGuests:
    """Return the addresses of interfaces that the table needs.

    Name servers in a network object are left out. Users write network objects, and could open any
    address by such a server. An interface whose packets bypass the host is included, because a
    router may send its packets back to this host.
    """
    guests, gateways, servers = set[Address](), set[Address](), set[Address]()
    for nic in nics:
        if nic.kind is not NicKind.CNI or nic.cni is None or nic.cni.result is None:
            continue
        if nic.on_segment:
            continue  # the filter of its tap has the rules
        guests.update(map(_ip, nic.addresses))
        if nic.addresses6:
            guests.add(link_local_of(mac_bytes(nic.mac)))
        gateways.update(_ip(one) for one in (nic.gateway, nic.gateway6, nic.router6) if one)
        servers.update(_ip(one) for one in nic.dns if one not in nic.network_dns)
    return PluginGuests(frozenset(guests), frozenset(gateways), frozenset(servers))


@functools.lru_cache(maxsize=4096)
def _ip(text: str) -> Address:
    """Return the address of a text with or without a prefix length. Each sync asks for all."""
    return ip_interface(text).ip


def table_name(bridge: str) -> str:
    """Return the name of the table. Two netds on one host have different tables."""
    return f"{table_of(bridge)}_plugins"


def plugin_table(
    bridge: str, known: PluginGuests, reach: ReachRules, *, replace: bool = True
) -> list[NetlinkCall]:
    """Return the transaction that makes the table. `replace` removes an existing table first."""
    chains = [nft.Chain("input", _LOCAL_IN, _FILTER), nft.Chain("forward", _FORWARD, _FILTER)]
    sets = [*reach_rules.host_sets(reach), *_sets(known)]
    made = nft_tables.replace_table if replace else nft_tables.new_table
    return made(_FAMILY, table_name(bridge), chains, plugin_rules(reach), sets)


def changed_guests(bridge: str, known: PluginGuests, there: PluginGuests) -> list[NetlinkCall]:
    """Return the transaction that changes the sets of the table from `there` to `known`."""
    calls: list[NetlinkCall] = []
    added, removed = _without(known, there), _without(there, known)
    for wanted, listed in zip(_sets(added), _sets(removed), strict=True):
        packed = {address.packed for address in listed.addresses}
        calls += nft_tables.changed_elements(_FAMILY, table_name(bridge), wanted, packed)
    return nft_tables.batch(calls)


def _without(known: PluginGuests, others: PluginGuests) -> PluginGuests:
    return PluginGuests(
        guests=known.guests - others.guests,
        gateways=known.gateways - others.gateways,
        servers=known.servers - others.servers,
    )


@functools.lru_cache(maxsize=2)
def plugin_rules(reach: ReachRules) -> tuple[nft.NftRule, ...]:
    """Return the rules of the table, which match guests by sets of their addresses.

    The rules limit these guests as `host_table` limits the guests of its bridge. Packets to other
    addresses than closed ones get no verdict, because the plugins' network policy may drop them.
    """
    drop = nft.verdict(nft.NftVerdict.DROP)
    hosts, hosts6 = reach_rules.host_sets(reach)
    guests, guests6, gateways, gateways6, servers, servers6 = _sets(PluginGuests())
    four = (*nft.is_ipv4(), *nft.ip_source_among(guests))
    six = (*nft.is_ipv6(), *nft.ip6_source_among(guests6))
    to_server = (*four, *nft.ip_destination_among(servers))
    to_server6 = (*six, *nft.ip6_destination_among(servers6))
    rules = [reach_rules.tunnel_frames("forward", hosts, *nft.ip_destination_among(hosts))]
    for chain in ("input", "forward"):
        rules += reach_rules.opened(chain, four, reach)
        rules += reach_rules.to_dns(chain, to_server)
        rules += reach_rules.opened6(chain, six, reach)
        rules += reach_rules.to_dns(chain, to_server6)
    return (
        *rules,
        reach_rules.pings("input", (*four, *nft.ip_destination_among(gateways))),
        *reach_rules.discovery("input", six),
        reach_rules.pings6("input", (*six, *nft.ip6_destination_among(gateways6))),
        nft.rule("input", four, drop),
        nft.rule("input", six, drop),
        *reach_rules.closed("forward", four, hosts, reach),
        *reach_rules.closed6("forward", six, hosts6, reach),
    )


def _sets(known: PluginGuests) -> tuple[nft.AddressSet, ...]:
    named = ("guests", known.guests), ("gateways", known.gateways), ("servers", known.servers)
    return tuple(
        one
        for number, (name, addresses) in zip((3, 5, 7), named, strict=True)
        for one in _both(name, number, addresses)
    )


def _both(
    name: str, number: int, addresses: Collection[Address]
) -> tuple[nft.AddressSet, nft.AddressSet]:
    four = sorted(one for one in addresses if isinstance(one, IPv4Address))
    six = sorted(one for one in addresses if isinstance(one, IPv6Address))
    return (
        nft.AddressSet(name, number, tuple(four)),
        nft.AddressSet(f"{name}6", number + 1, tuple(six), version=6),
    )


def has_plugin_table(bridge: str) -> NetlinkCall:
    """Return the query for the table."""
    return nft_tables.get_table(_FAMILY, table_name(bridge))


def list_plugin_rules(bridge: str) -> NetlinkCall:
    """Return the call that lists the rules of the table."""
    return nft_counters.list_rules(_FAMILY, table_name(bridge))


def no_plugin_table(bridge: str) -> list[NetlinkCall]:
    """Return the transaction that removes the table, if there is one."""
    return nft_tables.batch(nft_tables.ended(_FAMILY, table_name(bridge)))
