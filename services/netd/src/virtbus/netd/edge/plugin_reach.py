"""Limits what guests reach that CNI plugins connect: one nftables table of the host."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.nft_comparison import by_chain, have_equal_rules, listed_rule, sent_rule
from virtbus.netd.core.nft_tables import rules_in
from virtbus.netd.core.plugin_table import (
    PluginGuests,
    has_plugin_table,
    list_plugin_rules,
    no_plugin_table,
    plugin_guests,
    plugin_table,
    table_name,
)
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink


def _nobody() -> Iterable[Nic]:
    return ()


class PluginReach:
    """The table of all guests of this netd. All methods block, in the host's namespace."""

    def __init__(self, bridge: HostBridge) -> None:
        """`bridge` is the built-in one: its reach applies, and its name is in the table's."""
        self._bridge = bridge
        self.nics: Callable[[], Iterable[Nic]] = _nobody
        """Returns the interfaces of all VMs of this host. Any thread may call it."""
        self._written: tuple[PluginGuests, ReachRules] | None = None
        self._rules: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Ensure the table for the guests of now; without guests, remove it."""
        with self._lock:
            wanted = plugin_guests(self.nics()), self._reach
            if wanted != self._written:
                self._write(*wanted)

    def mend(self) -> None:
        """Write the table again if another program removed it or its rules."""
        with self._lock:
            wanted = plugin_guests(self.nics()), self._reach
            if wanted != self._written or self._fault():
                self._write(*wanted)

    def faults(self) -> list[str]:
        """Return a message if the table, or a rule of it, is missing."""
        with self._lock:
            fault = self._fault()
        return [fault] if fault else []

    def _fault(self) -> str:
        if self._written is None or not self._written[0].guests:
            return ""
        name = self._bridge.name
        with Netlink(NETLINK_NETFILTER) as filters:
            if filters.ask(has_plugin_table(name)) is None:
                return f"nftables {table_name(name)}: gone"
            listed = by_chain(
                listed_rule(one.message) for one in filters.dump(list_plugin_rules(name))
            )
        equal = have_equal_rules(self._rules, listed)
        return "" if equal else f"rules of nftables {table_name(name)}: gone, added or changed"

    @property
    def _reach(self) -> ReachRules:
        """Return the rules of the built-in network, without the resolver at its gateway."""
        reach = self._bridge.reach
        own = self._bridge.gateway.ip
        return replace(reach, dns=tuple(server for server in reach.dns if server != own))

    def _write(self, known: PluginGuests, reach: ReachRules) -> None:
        name = self._bridge.name
        calls = plugin_table(name, known, reach) if known.guests else no_plugin_table(name)
        with Netlink(NETLINK_NETFILTER) as filters:
            filters.do(calls)
        self._written = known, reach
        self._rules = by_chain(map(sent_rule, rules_in(calls)))
