"""Follows the security groups of this node's VMs, and applies changes to running guests.

Files keep the last state, so that a netd without the bus has the same rules.
"""

import asyncio
import logging
from collections.abc import Collection

from virtbus.bus.client.ports import Entry, WatchMark
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.group_filter import GroupedNic
from virtbus.netd.edge.groups_store import GroupsStore, StoredGroup
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.group_watch import GroupWatch
from virtbus.schemas.bounds import REQUEST_BYTES
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.group_rebuild import KnownGroups
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.subjects import node_group
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

PAGE_BYTES = REQUEST_BYTES
"""The size limit of the groups in one answer."""
AGAIN_S = 5.0
"""The pause before a new attempt to apply rules."""


class SecurityGroups:
    """Keeps the rules of VMs' interfaces up to date with the groups on the bus."""

    def __init__(
        self, node: str, doors: HostPorts, attachments: Attachments, store: GroupsStore
    ) -> None:
        self._book = doors.groups
        self._watch = GroupWatch(self._book)
        self._attachments = attachments
        self._store = store
        self._unsaved: set[str] = set()
        self._applied: dict[str, tuple[GroupedNic, ...]] = {}
        self._late: set[str] = set()
        """VMs whose networks were under construction during the last `_apply`."""
        self._changed = asyncio.Event()
        attachments.built = self._built
        for one in store.all():  # before any network is made or adopted
            key = node_group(node, one.group.namespace, one.group.name)
            self._book.groups[key] = one.group
            self._book.nonces[key] = one.nonce

    def known(self, after: str = "") -> KnownGroups:
        """Return a page of the groups with keys after `after`, to rebuild the bus.

        The groups have no peers.
        """
        found: dict[str, NodeGroup] = {}
        left_bytes = PAGE_BYTES
        for key, group in sorted(self._book.groups.items()):
            if key <= after:
                continue
            bare = group.model_copy(update={"peers": {}})
            left_bytes -= len(encode(bare))
            if left_bytes < 0 and found:
                return KnownGroups(groups=found, more=True)
            found[key] = bare
        return KnownGroups(groups=found)

    # --- the bus ----------------------------------------------------------------------------
    def see(self, item: Entry | WatchMark) -> None:
        """Process an item of the watch on this node's keys. Unreadable values are ignored."""
        if changed := self._watch.see(item):
            self._save(changed)

    def _save(self, keys: Collection[str]) -> None:
        self._unsaved.update(keys)
        self._changed.set()

    def _built(self, uid: str) -> None:
        """Apply the rules again if a change came during the construction of this network."""
        if uid in self._late:
            self._changed.set()

    # --- the host ---------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            stored = await self._stored()
            if not (await self._apply() and stored):
                await wait_for_event(self._changed, AGAIN_S)
                self._changed.set()

    async def _stored(self) -> bool:
        """Store the changed groups.

        Log a failure and return False, so that the rules are applied anyway.
        """
        try:
            await self._write()
        except OSError as error:
            extra = {"code": "groups_failed"}
            log.error("cannot store security groups: %s", error, extra=extra)
            return False
        return True

    async def _write(self) -> None:
        """Raises OSError."""
        while self._unsaved:
            key = self._unsaved.pop()
            group = self._book.groups.get(key)
            try:
                if group is not None:
                    stored = StoredGroup(nonce=self._book.nonces[key], group=group)
                    await in_thread(self._store.writer(stored))
                else:
                    await in_thread(self._store.remover(key))
            except OSError:
                self._unsaved.add(key)
                raise

    async def _apply(self) -> bool:
        complete = True
        there, self._late = self._attachments.ready(), self._attachments.begun()
        self._applied = {
            one.uid: self._applied[one.uid] for one in there if one.uid in self._applied
        }
        for attachment in there:
            wanted = self._book.of(attachment.joined)
            if self._applied.get(attachment.uid, ()) == wanted and attachment.uid in self._applied:
                continue
            try:
                await self._attachments.amend(attachment.uid, lambda vm: vm)
            except (VirtbusError, OSError) as error:
                extra = {"code": "rules_failed", "uid": attachment.uid}
                log.error("the rules of its groups are not in force: %s", error, extra=extra)
                complete = False
                continue
            self._applied[attachment.uid] = wanted
        return complete
