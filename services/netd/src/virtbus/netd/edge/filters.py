"""Installs and checks the anti-spoofing filters of taps, in the calling thread's namespace."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Interface

from virtbus.netd.core.antispoof import (
    Tap,
    guest_filters,
    has_chain,
    has_table,
    list_rules,
    refusals,
)
from virtbus.netd.core.attachment import Nic, NicKind
from virtbus.netd.core.nft_counters import counted_packets
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink


def _taps(nics: Sequence[Nic]) -> list[Tap]:
    return [
        Tap(
            nic.tap,
            nic.mac,
            tuple(IPv4Interface(address).ip for address in nic.addresses4),
            IPv4Address(nic.gateway) if nic.kind is NicKind.BRIDGE and nic.gateway else None,
            tuple(IPv6Interface(address).ip for address in nic.addresses6),
        )
        for nic in nics
    ]


def faults(nics: Sequence[Nic]) -> list[str]:
    """Return a message for each tap of `nics` whose current filter is missing."""
    with Netlink(NETLINK_NETFILTER) as filters:
        return [
            f"the filter of {tap.name} is gone"
            for tap in _taps(nics)
            if filters.ask(has_chain(tap)) is None
        ]


def refused(nics: Sequence[Nic]) -> list[dict[str, int]]:
    """Return the packets that the filter of each interface has dropped, by rule.

    The counts start at zero when netd replaces a filter.
    """
    with Netlink(NETLINK_NETFILTER) as filters:
        found = []
        for tap in _taps(nics):
            rules = (counted_packets(one.message) for one in filters.dump(list_rules(tap)))
            counts = [count for count in rules if count is not None]
            found.append(dict(zip(refusals(tap), counts, strict=True)))
    return found


def guard(nics: Sequence[Nic]) -> None:
    """Ensure the filters of `nics` in the namespace.

    Unless all are current, one transaction replaces the namespace's nftables table.
    """
    taps = _taps(nics)
    with Netlink(NETLINK_NETFILTER) as filters:
        stands = filters.ask(has_table()) is not None
        if not stands or any(filters.ask(has_chain(tap)) is None for tap in taps):
            filters.do(guest_filters(taps, replace=stands))
