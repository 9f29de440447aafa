"""Installs and checks the anti-spoofing filters of taps, in the namespace of a netlink socket."""

from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Interface

from virtbus.netd.core.antispoof import (
    Tap,
    guest_filters,
    has_chain,
    has_table,
    list_rules,
    list_wire_rules,
    refusals,
    sent_rules,
    sent_wire_rules,
)
from virtbus.netd.core.attachment import WITH_NAMES, Nic
from virtbus.netd.core.masquerade import guest_side
from virtbus.netd.core.nft_comparison import are_equal, listed_rule
from virtbus.netd.core.nft_counters import counted_packets
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.netlink import Netlink


def _taps(nics: Sequence[Nic], reach: ReachRules) -> list[Tap]:
    return [
        Tap(
            nic.tap,
            nic.mac,
            tuple(IPv4Interface(address).ip for address in seen.addresses4),
            IPv4Address(nic.gateway) if nic.kind in WITH_NAMES and nic.gateway else None,
            tuple(IPv6Interface(address).ip for address in seen.addresses6),
            reach if nic.filters_reach else None,
            nic.on_segment,
            nic.eth if nic.of_segment and not nic.on_segment else "",
        )
        for nic, seen in ((nic, guest_side(nic)) for nic in nics)
    ]


def faults(rules: Netlink, nics: Sequence[Nic], reach: ReachRules) -> list[str]:
    """Return a message for each tap of `nics` whose filter is missing or wrong."""
    found = [(tap, _wrong(rules, tap)) for tap in _taps(nics, reach)]
    return [f"the filter of {tap.name} {wrong}" for tap, wrong in found if wrong]


def _wrong(rules: Netlink, tap: Tap) -> str:
    if rules.ask(has_chain(tap)) is None:
        return "is gone"
    sent = sent_rules(tap)
    listed = [listed_rule(one.message)[1] for one in rules.dump(list_rules(tap))]
    if len(listed) != len(sent):
        return f"has {len(listed)} rules of {len(sent)}"
    return "" if are_equal(sent, listed) and _is_quiet(rules, tap) else "has other rules"


def _is_quiet(rules: Netlink, tap: Tap) -> bool:
    """Return True if the tap has no `wire`, or the rules on the `wire` are current.

    A tap has a `wire`, the link to a segment, if netd assigns the guest's addresses on that
    segment. The rules on the `wire` drop the answers of the segment's DHCP servers and the
    advertisements of its routers.
    """
    if not tap.wire:
        return True
    listed = [listed_rule(one.message)[1] for one in rules.dump(list_wire_rules(tap))]
    return are_equal(sent_wire_rules(), listed)


def refused(rules: Netlink, nics: Sequence[Nic], reach: ReachRules) -> list[dict[str, int]]:
    """Return for each interface the number of dropped packets, by rule of its filter.

    A new filter starts at zero. A filter that another program has changed has no counts.
    """
    found = []
    for tap in _taps(nics, reach):
        counted = (counted_packets(one.message) for one in rules.dump(list_rules(tap)))
        counts = [count for count in counted if count is not None]
        labels = refusals(tap)
        totals: Counter[str] = Counter()
        for rule, count in zip(labels, counts, strict=True) if len(labels) == len(counts) else ():
            totals[rule] += count
        found.append(dict(totals))
    return found


def guard(rules: Netlink, nics: Sequence[Nic], reach: ReachRules) -> None:
    """Ensure the filters of `nics` in the namespace.

    `reach` lists the addresses closed to guests. It applies only to interfaces whose frames bypass
    the host's IP stack (`filters_reach`). If any filter is not current, one transaction replaces
    the namespace's nftables table.
    """
    taps = _taps(nics, reach)
    stands = rules.ask(has_table()) is not None
    if not stands or any(_wrong(rules, tap) for tap in taps):
        rules.do(guest_filters(taps, replace=stands))
