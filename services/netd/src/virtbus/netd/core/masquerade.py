"""Addresses, routes and nftables rules of guests behind NAT in their namespace (ADR 0085).

The namespace has the addresses of the network on `eth`, and is the guest's gateway on the inner
bridge. It rewrites the source of connections that the guest opens. From outside, only packets to a
declared port and echo requests lead to the guest. If the interface declares no port, all packets
lead to the guest.
"""

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface, ip_network

from virtbus.netd.core import nft, nft_counters, nft_tables
from virtbus.netd.core import nft_connections as ct
from virtbus.netd.core.attachment import Nic, Route
from virtbus.netd.core.guest_ends import GuestEnds
from virtbus.netd.core.host_table import ROUTER
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.nft_nat import Address, destination_becomes, source_becomes
from virtbus.netd.core.routes import KernelRoute, default_routes
from virtbus.schemas.errors import Code, Detail, VirtbusError

TABLE = "virtbus_nat"
PORT = "port"
"""The label of the counter for dropped packets to ports that lead to no guest."""
_FAMILY = nft.Family.INET
_PREROUTING, _LOCAL_IN, _FORWARD, _POSTROUTING = 0, 1, 2, 4
_BEFORE_NAT, _DESTINATION_NAT, _FILTER, _SOURCE_NAT = -110, -100, 0, 100
_PROTOCOLS = {"tcp": nft.TCP, "udp": nft.UDP}
_ECHO_REQUEST6 = 128
_NEIGHBOURS = 135, 136
"""Types of ICMPv6: the solicitations and advertisements of neighbours."""


def refuse_overlap(nic: Nic) -> Nic:
    """Return the interface unchanged, after a check of the guest's own networks.

    Raises:
        VirtbusError: 422 `guest_network_taken`: a network of the guest overlaps the network of an
            address of the interface.
    """
    for ends in nic.guest_ends:
        inner = ends.guest.network
        outer = [ip_interface(one).network for one in nic.addresses]
        if any(one.version == inner.version and one.overlaps(inner) for one in outer):
            field = "vm_network_cidr" if inner.version == 4 else "vm_ipv6_network_cidr"
            message = (
                f"the network '{nic.network}' has addresses of {inner}; choose another {field}"
            )
            path = f"{nic.path}.{field}"
            detail = Detail(path=path, message=f"overlaps '{nic.network}'")
            raise VirtbusError(Code.UNSUPPORTED, "guest_network_taken", message, details=(detail,))
    return nic


def guest_side(nic: Nic, *, default: bool = True) -> Nic:
    """Return an interface as its guest sees it, for DHCP and the filter of the tap.

    Without a `default` route, the guest gets routes to the subnets of the interface's addresses.
    """
    if not nic.is_translated:
        return nic
    gateways = {ends.gateway.version: str(ends.gateway.ip) for ends in nic.guest_ends}
    routes = [one.destination for one in nic.routes]
    if not default:
        routes += [str(ip_interface(one).network) for one in nic.addresses4]
    update = {
        "addresses": tuple(str(ends.guest) for ends in nic.guest_ends),
        "gateway": gateways.get(4, "") if nic.addresses else "",
        "gateway6": gateways.get(6, ""),
        "routes": tuple(
            Route(destination=one, gateway=gateways[4])
            for one in routes
            if ":" not in one and 4 in gateways
        ),
    }
    return nic.model_copy(update=update)


def routes_of(nic: Nic, index: int) -> list[KernelRoute]:
    """Return the namespace's routes through the link `index`, which leads to the network."""
    others = [
        KernelRoute(
            ip_network(one.destination), ip_address(one.gateway) if one.gateway else None, index
        )
        for one in nic.routes
    ]
    return others + default_routes((nic.gateway, nic.gateway6), index)


# --- rules ------------------------------------------------------------------------------------
def nat_table(nics: Sequence[Nic]) -> list[NetlinkCall]:
    """Return the transaction that makes or replaces the table of a VM's namespace.

    Only `lo`, neighbour discovery and the guest's echo requests reach the namespace itself. The
    rules of `forward` name links, so the bridged packets of other interfaces pass.
    """
    chains = [
        nft.Chain("outside", _PREROUTING, _BEFORE_NAT),
        nft.Chain("prerouting", _PREROUTING, _DESTINATION_NAT, kind="nat"),
        nft.Chain("postrouting", _POSTROUTING, _SOURCE_NAT, kind="nat"),
        nft.Chain("input", _LOCAL_IN, _FILTER),
        nft.Chain("forward", _FORWARD, _FILTER),
    ]
    drop = nft.verdict(nft.NftVerdict.DROP)
    rules = [one for nic in nics for one in (*_translated(nic), *_input(nic), *_forward(nic))]
    rules.append(nft.rule("input", nft.comes_from_elsewhere_than("lo"), drop))
    return nft_tables.replace_table(_FAMILY, TABLE, chains, rules)


def _translated(nic: Nic) -> Iterator[nft.NftRule]:
    """Yield the rules that rewrite addresses or drop packets from outside to the guest's network.

    These packets must be dropped here, because `forward` accepts every connection that the kernel
    calls rewritten. The kernel calls a connection rewritten even if only an identifier changed.
    """
    for ends, outer in _pairs(nic):
        guest = ends.guest.ip
        own = _is_in(ends.guest.network)
        drop = nft.counter(), nft.verdict(nft.NftVerdict.DROP)
        yield nft.rule("outside", nft.came_from(nic.eth), own, *drop)
        for address in outer:
            arrived = (*nft.came_from(nic.eth), *_is_to(address))
            for match in _open(nic, guest.version):
                yield nft.rule("prerouting", arrived, match, destination_becomes(guest))
        if outer:
            opened = (*_is_from(guest), *nft.goes_to(nic.eth))
            yield nft.rule("postrouting", opened, source_becomes(outer[0]))


def _open(nic: Nic, version: int) -> Iterator[Sequence[bytes]]:
    """Yield the matches of packets that lead to the guest: all packets without declared ports."""
    if not nic.ports:
        yield ()
        return
    for one in nic.ports:
        yield (*nft.l4_protocol(_PROTOCOLS[one.protocol]), *_to_ports(*one.range))
    yield _is_echo(version)


def _to_ports(first: int, last: int) -> tuple[bytes, ...]:
    """Match the destination ports of a range. The rule must match the protocol before."""
    if first == last:
        return nft.destination_port(first)
    low, high = first.to_bytes(2, "big"), last.to_bytes(2, "big")
    loaded = nft.load(nft.TRANSPORT, 2, 2)
    return loaded, nft.compare(low, nft.GTE), nft.compare(high, nft.LTE)


def _input(nic: Nic) -> Iterator[nft.NftRule]:
    accept, drop = nft.verdict(nft.NftVerdict.ACCEPT), nft.verdict(nft.NftVerdict.DROP)
    guest, outside = nft.came_from(nic.bridge), nft.came_from(nic.eth)
    for ends in nic.guest_ends:
        for place in (ends.gateway.ip, *((ROUTER.ip,) if ends.gateway.version == 6 else ())):
            yield nft.rule("input", guest, _is_to(place), _is_echo(place.version), accept)
    if nic.addresses6:
        icmp = (*nft.is_ipv6(), *nft.l4_protocol(nft.ICMP6))
        for link in (guest, outside):
            for kind in _NEIGHBOURS:
                yield nft.rule("input", link, icmp, nft.icmp6_type(kind), accept)
    yield nft.rule("input", outside, nft.counter(), drop)


def _forward(nic: Nic) -> Iterator[nft.NftRule]:
    """Yield the rules between guest and network.

    From outside, only connections whose destination was rewritten reach the guest.
    """
    accept, drop = nft.verdict(nft.NftVerdict.ACCEPT), nft.verdict(nft.NftVerdict.DROP)
    guest, outside = nft.came_from(nic.bridge), nft.came_from(nic.eth)
    yield nft.rule("forward", guest, nft.goes_elsewhere_than(nic.eth), drop)
    yield nft.rule("forward", outside, nft.goes_elsewhere_than(nic.bridge), drop)
    for out, source in ((nic.eth, nic.bridge), (nic.bridge, nic.eth)):
        yield nft.rule("forward", nft.goes_to(out), nft.comes_from_elsewhere_than(source), drop)
    for link in (guest, outside):
        yield nft.rule("forward", link, ct.is_invalid(), drop)
    yield nft.rule("forward", outside, nft.established(), accept)
    yield nft.rule("forward", outside, nft.redirected(), accept)
    yield nft.rule("forward", outside, nft.counter(), drop)


def _pairs(nic: Nic) -> Iterator[tuple[GuestEnds, list[Address]]]:
    outer = [ip_interface(one).ip for one in nic.addresses]
    for ends in nic.guest_ends:
        yield ends, [one for one in outer if one.version == ends.guest.version]


def _is_echo(version: int) -> tuple[bytes, ...]:
    if version == 4:
        return (*nft.l4_protocol(nft.ICMP), *nft.is_echo_request())
    return (*nft.l4_protocol(nft.ICMP6), *nft.icmp6_type(_ECHO_REQUEST6))


def _is_to(address: Address) -> tuple[bytes, ...]:
    if address.version == 4:
        return (*nft.is_ipv4(), *nft.ip_destination(address))
    return (*nft.is_ipv6(), *nft.ip6_destination(address))


def _is_from(address: Address) -> tuple[bytes, ...]:
    if address.version == 4:
        return (*nft.is_ipv4(), *nft.ip_source(address))
    return (*nft.is_ipv6(), *nft.ip6_source(address))


def _is_in(network: IPv4Network | IPv6Network) -> tuple[bytes, ...]:
    if network.version == 4:
        return (*nft.is_ipv4(), *nft.ip_destination_in(network))
    return (*nft.is_ipv6(), *nft.ip6_destination_in(network))


def has_table() -> NetlinkCall:
    """Return the query for the table in a namespace (ENOENT if there is none)."""
    return nft_tables.get_table(_FAMILY, TABLE)


def no_table() -> list[NetlinkCall]:
    """Return the transaction that removes the table."""
    return nft_tables.batch(nft_tables.ended(_FAMILY, TABLE))


def list_rules() -> NetlinkCall:
    """Return the call that lists the rules of the table."""
    return nft_counters.list_rules(_FAMILY, TABLE)
