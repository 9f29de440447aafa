"""Limits the reach of guests behind CNI plugins, by one nftables table of the host."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.nft_comparison import by_chain, have_equal_rules, listed_rule
from virtbus.netd.core.plugin_table import (
    PluginGuests,
    changed_guests,
    has_plugin_table,
    list_plugin_rules,
    no_plugin_table,
    plugin_guests,
    plugin_rules,
    plugin_table,
    table_name,
)
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink, NetlinkError


def _nobody() -> Iterable[Nic]:
    return ()


class PluginReach:
    """The nftables table for all guests of this netd behind CNI plugins.

    All methods block. Their thread must be in the host's namespace.
    """

    def __init__(self, bridge: HostBridge) -> None:
        """`bridge` is the host bridge of the built-in network.

        The bridge's reach applies to guests behind CNI plugins, too. The table is named after the
        bridge.
        """
        self._bridge = bridge
        self.nics: Callable[[], Iterable[Nic]] = _nobody
        """Returns the interfaces of all VMs of this host. Any thread may call it."""
        self._written: tuple[PluginGuests, ReachRules] | None = None
        self._stands: bool | None = None
        """True if the table exists; None if an earlier netd may have left a table."""
        self._filters: Netlink | None = None
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Ensure that the table has the present guests and reach.

        After the last guest, the table usually stays, without addresses, until `remove_unused`. To
        make it again for the next guest would take 1 to 2 ms.
        """
        with self._lock:
            wanted = plugin_guests(self.nics()), self._reach
            if wanted != self._written:
                self._change(*wanted)

    def tidy(self) -> None:
        """Remove the table of an earlier netd, if there are no guests."""
        with self._lock:
            if self._stands is None:
                self._remove_unused()

    def remove_unused(self) -> None:
        """Remove the table of this netd, if there are no guests."""
        with self._lock:
            if self._stands:
                self._remove_unused()

    def mend(self) -> None:
        """Write the table if the guests or their reach changed, or if another program changed it.

        Without guests, remove the table instead.
        """
        with self._lock:
            wanted = plugin_guests(self.nics()), self._reach
            if wanted != self._written or self._fault():
                self._write(*wanted)

    def faults(self) -> list[str]:
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
        rules = plugin_rules(self._written[1])
        sent = by_chain((rule.chain, b"".join(rule.expressions)) for rule in rules)
        equal = have_equal_rules(sent, listed)
        return "" if equal else f"rules of nftables {table_name(name)}: gone, added or changed"

    @property
    def _reach(self) -> ReachRules:
        """Return the rules of the built-in network, without the resolver at its gateway."""
        reach = self._bridge.reach
        own = self._bridge.gateway.ip
        return replace(reach, dns=tuple(server for server in reach.dns if server != own))

    def _change(self, known: PluginGuests, reach: ReachRules) -> None:
        """Send the changes since the last write. Write the whole table if that is impossible."""
        calls = self._changes(known, reach)
        if calls:
            try:
                self._send(calls)
            except NetlinkError:
                calls = []  # another program has changed the table
        if calls:
            self._written, self._stands = (known, reach), True
        else:
            self._write(known, reach)

    def _changes(self, known: PluginGuests, reach: ReachRules) -> list[NetlinkCall]:
        """Return a transaction that is cheaper than a new table, or an empty list."""
        name = self._bridge.name
        if self._stands and self._written is not None and self._written[1] == reach:
            return changed_guests(name, known, self._written[0])
        if self._stands is False and known.guests:
            return plugin_table(name, known, reach, replace=False)
        return []

    def _write(self, known: PluginGuests, reach: ReachRules) -> None:
        name = self._bridge.name
        self._send(plugin_table(name, known, reach) if known.guests else no_plugin_table(name))
        self._written, self._stands = (known, reach), bool(known.guests)

    def _send(self, calls: Sequence[NetlinkCall]) -> None:
        """Use a socket that stays open, because a close may wait for RCU."""
        filters = self._filters = self._filters or Netlink(NETLINK_NETFILTER)
        try:
            filters.do(calls)
        except OSError:
            self._disconnect()
            raise

    def close(self) -> None:
        """Remove the table of this netd if there are no guests, and close the socket.

        A later change opens another socket.
        """
        try:
            self.remove_unused()
        finally:
            with self._lock:
                self._disconnect()

    def _remove_unused(self) -> None:
        known = plugin_guests(self.nics())
        if not known.guests:
            self._write(known, self._reach)

    def _disconnect(self) -> None:
        if self._filters is not None:
            self._filters.close()
            self._filters = None
