"""Anti-spoofing of the taps in the calling thread's namespace."""

from collections.abc import Sequence
from ipaddress import IPv4Interface

from virtbus.netd.core.antispoof import guest_filters, has_table
from virtbus.netd.core.attachment import Nic
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink


def guard(nics: Sequence[Nic]) -> None:
    """Make the namespace's table exactly that of `nics`, in one transaction."""
    taps = [
        (nic.tap, nic.mac, [IPv4Interface(address).ip for address in nic.addresses]) for nic in nics
    ]
    with Netlink(NETLINK_NETFILTER) as filters:
        filters.do(guest_filters(taps, replace=filters.ask(has_table()) is not None))
