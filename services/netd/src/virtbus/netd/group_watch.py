"""Follows the security groups of this node's VMs on the bus.

A purge marker ends its group. A complete list also ends the missing groups that came from the same
bus incarnation. Groups from another incarnation stay, because a bus restored from a backup may have
lost them.
"""

import logging
from collections.abc import Collection

from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.records import of_node_group, read_node_group, read_stored
from virtbus.schemas.subjects import JOIN_KEY
from virtbus.schemas.vm import JoinNonce

log = logging.getLogger(__name__)


class GroupWatch:
    """Updates the node's groups from its keys on the bus."""

    def __init__(self, book: NodeGroupBook) -> None:
        self._book = book
        self._nonce = ""
        self._listed: set[str] = set()

    def see(self, item: Entry | WatchMark) -> set[str]:
        """Process an item of the watch on the node's keys, and return the changed keys.

        An unreadable value leaves the last readable group in force.
        """
        if item is WatchMark.RESET:
            self._listed.clear()
            self._nonce = ""
            return set()
        if not isinstance(item, Entry):
            return self._keep_listed()
        try:
            return self._take(item)
        except VirtbusError as error:
            log.error("%s cannot be read: %s", item.key, error, extra={"code": "bad_record"})
            self._listed.add(item.key)
            return set()

    def _take(self, entry: Entry) -> set[str]:
        if entry.key.endswith(f".{JOIN_KEY}") and entry.kind is EntryKind.PUT:
            self._nonce = read_stored(JoinNonce, entry.key, entry.value).nonce
        if not of_node_group(entry.key):
            return set()
        if entry.kind is not EntryKind.PUT:
            return self._end({entry.key})
        group = read_node_group(entry.key, entry.value)
        self._listed.add(entry.key)
        book = self._book
        if book.groups.get(entry.key) == group and book.nonces.get(entry.key) == self._nonce:
            return set()
        book.groups[entry.key] = group
        book.nonces.setdefault(entry.key, self._nonce)
        return {entry.key}

    def _keep_listed(self) -> set[str]:
        """End the groups that are missing in a complete list of their bus incarnation.

        Return the keys of these groups, and of the listed groups that came from another
        incarnation. The latter get the nonce of the present incarnation.
        """
        if not self._nonce:
            return set()
        nonces = self._book.nonces
        seen = {key for key in self._listed if nonces.get(key) != self._nonce}
        nonces.update(dict.fromkeys(seen, self._nonce))
        of_this_bus = {key for key, nonce in nonces.items() if nonce == self._nonce}
        return seen | self._end(of_this_bus - self._listed)

    def _end(self, keys: Collection[str]) -> set[str]:
        for key in keys:
            self._book.nonces.pop(key, None)
        return {key for key in keys if self._book.groups.pop(key, None) is not None}
