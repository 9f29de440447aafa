"""Makes a VM's namespace the gateway of a guest behind NAT: settings, addresses, routes, rules.

The calling thread must be in the namespace of the netlink socket. All functions are idempotent.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_interface

from virtbus.netd.core import link_addresses, masquerade
from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.host_table import ROUTER
from virtbus.netd.core.nft_comparison import by_chain, have_equal_rules, listed_rule, sent_rule
from virtbus.netd.core.nft_counters import counted_packets
from virtbus.netd.core.nft_tables import rules_in
from virtbus.netd.core.routes import KernelRoute, list_routes, listed_route, put_route
from virtbus.netd.edge import links
from virtbus.netd.edge.namespaces import read_sysctl, write_sysctl
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.network import LinkState

_FORWARDING6 = "net/ipv6/conf/all/forwarding"


def of(nics: Sequence[Nic]) -> list[Nic]:
    """Return the interfaces whose guests are behind NAT."""
    return [nic for nic in nics if nic.is_translated]


def connect(inside: Netlink, nics: Sequence[Nic]) -> None:
    """Give the namespace its settings, addresses and routes. The links must exist."""
    for nic in of(nics):
        for key, value in _settings(nic):
            _ensure(key, value)
        inside.do(
            [link_addresses.add_address(index, one) for index, one in _addresses(inside, nic)]
        )
        inside.do([put_route(route) for route in _routes(inside, nic)])


def faults(inside: Netlink, rules: Netlink, nics: Sequence[Nic]) -> list[str]:
    """Return a message for each setting, address, route or rule that is missing or wrong."""
    own = of(nics)
    found = []
    if own:
        there = {(one.index, one.interface) for one in links.list_addresses(inside)}
        routes = {listed_route(one.message) for one in inside.dump(list_routes())}
        for nic in own:
            if nic.state is LinkState.DOWN:
                continue  # the kernel removes addresses and routes of a link that is down
            found += [
                f"{nic.bridge} and {nic.eth} do not forward: {key} is not {value}"
                for key, value in _settings(nic)
                if not _has(key, value)
            ]
            found += [
                f"{nic.eth} or {nic.bridge} lacks the address {one}"
                for index, one in _addresses(inside, nic)
                if (index, one) not in there
            ]
            found += [
                f"{nic.eth} lacks the route to {route.destination}"
                for route in _routes(inside, nic)
                if route not in routes
            ]
    return found + ([] if _stands(rules, own) else ["the rules of its NAT are gone or wrong"])


def guard(rules: Netlink, nics: Sequence[Nic]) -> None:
    """Ensure the rules; remove the table if no guest is behind NAT.

    The kernel stores each connection's translation, so connections survive.
    """
    own = of(nics)
    if not _stands(rules, own):
        rules.do(masquerade.nat_table(own) if own else masquerade.no_table())


def refused(rules: Netlink, nics: Sequence[Nic]) -> dict[int, dict[str, int]]:
    """Return the number of dropped packets to closed ports, by interface index.

    The number is under the key `masquerade.PORT`. A change of the rules resets the number.
    """
    own = of(nics)
    listed = [one.message for one in rules.dump(masquerade.list_rules())] if own else []
    return {nic.index: {masquerade.PORT: _counted(listed, nic)} for nic in own}


def _counted(rules: Sequence[bytes], nic: Nic) -> int:
    name = nic.eth.encode() + b"\0"
    return sum(counted_packets(one) or 0 for one in rules if name in one)


def _stands(rules: Netlink, own: Sequence[Nic]) -> bool:
    """Return True if the table has the rules of `own`; for an empty `own`, if no table exists."""
    there = rules.ask(masquerade.has_table()) is not None
    if not own or not there:
        return there == bool(own)
    sent = by_chain(map(sent_rule, rules_in(masquerade.nat_table(own))))
    listed = by_chain(listed_rule(one.message) for one in rules.dump(masquerade.list_rules()))
    return have_equal_rules(sent, listed)


def _settings(nic: Nic) -> Iterator[tuple[str, str]]:
    """Yield key and value of each sysctl.

    All are per namespace; the host's sysctls stay unchanged.
    """
    for link in (nic.eth, nic.bridge):
        yield f"net/ipv4/conf/{link}/forwarding", "1"
        yield f"net/ipv4/conf/{link}/arp_ignore", "1"
        if nic.addresses6:
            yield f"net/ipv6/conf/{link}/accept_dad", "0"
            yield f"net/ipv6/conf/{link}/accept_ra", "0"
            yield f"net/ipv6/conf/{link}/keep_addr_on_down", "1"
            yield f"net/ipv6/conf/{link}/disable_ipv6", "0"
    if nic.addresses6:
        yield _FORWARDING6, "1"


def _has(key: str, value: str) -> bool:
    with suppress(FileNotFoundError):
        return read_sysctl(key) == value
    return False


def _ensure(key: str, value: str) -> None:
    """Write only a differing value, because any write may reset a link's addresses."""
    if not _has(key, value):
        write_sysctl(key, value)


def _addresses(inside: Netlink, nic: Nic) -> Iterator[tuple[int, link_addresses.Interface]]:
    eth, bridge = links.find(inside, nic.eth), links.find(inside, nic.bridge)
    if eth is None or bridge is None:
        return
    for text in nic.addresses:
        yield eth.index, ip_interface(text)
    for ends in nic.guest_ends:
        yield bridge.index, ends.gateway
    if nic.addresses6:
        yield bridge.index, ROUTER


def _routes(inside: Netlink, nic: Nic) -> list[KernelRoute]:
    eth = links.find(inside, nic.eth)
    return masquerade.routes_of(nic, eth.index) if eth is not None else []
