"""Installs and checks the rules of security groups.

The calling thread must be in the namespace of the netlink socket.
"""

from collections.abc import Sequence

from virtbus.netd.core import group_filter
from virtbus.netd.core.group_filter import GroupedNic
from virtbus.netd.core.nft import AddressSet
from virtbus.netd.core.nft_counters import counted_packets
from virtbus.netd.core.nft_tables import listed_elements
from virtbus.netd.edge.namespaces import read_sysctl, write_sysctl
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import Code, VirtbusError

_OF_BRIDGES = "net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"
_PICK_UP = "net/netfilter/nf_conntrack_tcp_loose"
"""With 0, conntrack calls a TCP connection invalid if it did not see the handshake. A connection
that is older than the rules thus never counts as opened by the guest.
"""


def guard(rules: Netlink, nics: Sequence[GroupedNic]) -> None:
    """Ensure the rules of `nics`: all interfaces of a VM to which security groups apply.

    If `nics` is empty, remove the tables, and let frames on this namespace's bridges bypass the IP
    hooks.

    One transaction replaces the tables. If only members of groups changed, it updates the address
    sets.

    Raises:
        VirtbusError: 422 `no_bridge_filter`: the host's kernel lacks br_netfilter. This function
            has then closed the interfaces, which would accept all packets without their rules.
    """
    stands = rules.ask(group_filter.has_table()) is not None
    if not nics:
        if stands:
            rules.do(group_filter.no_tables())
        _skip_hooks()
        return
    if not _track():
        if rules.ask(group_filter.has_closed(nics)) is None:
            rules.do(group_filter.closed_tables(nics))
        raise _no_bridge_filter(nics)
    if not stands or rules.ask(group_filter.has_rules(nics)) is None:
        rules.do(group_filter.group_tables(nics))
        _track()  # `_PICK_UP` may appear only after the first conntrack rule
    else:
        rules.do(group_filter.changed_members(_changes(rules, nics)))


def faults(rules: Netlink, nics: Sequence[GroupedNic]) -> list[str]:
    """Return at most one message, about wrong or missing rules or members."""
    if not nics:
        stands = rules.ask(group_filter.has_table()) is not None
        return ["there are rules of security groups that do not apply"] if stands else []
    if rules.ask(group_filter.has_closed(nics)) is not None:
        return [_no_bridge_filter(nics).body.message]
    if rules.ask(group_filter.has_rules(nics)) is None:
        return ["the rules of its security groups are gone"]
    if not all(map(_is_on, _OF_BRIDGES)):
        return ["the rules of its security groups are switched off"]
    wrong = group_filter.changed_members(_changes(rules, nics))
    return ["members of its security groups are missing"] if wrong else []


def refused(rules: Netlink, nics: Sequence[GroupedNic]) -> dict[int, dict[str, int]]:
    """Return numbers of dropped packets, by interface index and counter label.

    The counts restart at zero when the rules change.
    """
    found: dict[int, dict[str, int]] = {}
    for nic in nics:
        if rules.ask(group_filter.has_rules(nics)) is None:
            continue
        found[nic.index] = {
            what: sum(counted_packets(one.message) or 0 for one in rules.dump(call))
            for what, call in group_filter.counting(nic).items()
        }
    return found


def _changes(rules: Netlink, nics: Sequence[GroupedNic]) -> list[tuple[AddressSet, set[bytes]]]:
    return [(one, _there(rules, one)) for one in group_filter.sets_of(nics)]


def _there(rules: Netlink, one: AddressSet) -> set[bytes]:
    messages = rules.dump(group_filter.list_members(one))
    return {packed for reply in messages for packed in listed_elements(reply.message)}


def _is_on(key: str) -> bool:
    """Return False also for a missing setting: its module may have been unloaded."""
    try:
        return read_sysctl(key) == "1"
    except FileNotFoundError:
        return False


def _track() -> bool:
    """Send packets on the bridges of this namespace through the IP hooks.

    Return False if the host's kernel lacks br_netfilter.
    """
    if not all(write_sysctl(key, "1") for key in _OF_BRIDGES):
        return False
    write_sysctl(_PICK_UP, "0")
    return True


def _skip_hooks() -> None:
    """Let frames on this namespace's bridges bypass the IP hooks, which have no rules."""
    for key in _OF_BRIDGES:
        write_sysctl(key, "0")


def _no_bridge_filter(nics: Sequence[GroupedNic]) -> VirtbusError:
    message = (
        f"{', '.join(nic.eth for nic in nics)} closed: the host's kernel cannot apply security "
        "groups, because it has no br_netfilter; load it with `modprobe br_netfilter`"
    )
    return VirtbusError(Code.UNSUPPORTED, "no_bridge_filter", message)
