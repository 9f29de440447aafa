"""Writes the security groups of each node's VMs to the node's own keys (ADR 0069).

A batch that writes a VM's record also writes the group keys that the VM's node lacks. The keys come
before the record, so that a node knows a VM's groups no later than the VM. The leader task
`NodeGroups` writes all other changes.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import NoReturn, TypeVar

from virtbus.bus.client.ports import Bus, Write
from virtbus.bus.errors import BusError, ConflictError, OversizeError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.security_groups import Membership
from virtbus.controller.edge.cas import MARKER_TTL_S
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas import subjects
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.records import group_of_node_group
from virtbus.schemas.security_group import NodeGroup, SecurityGroupRecord, selects
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

T = TypeVar("T")
StoredValue = tuple[NodeGroup | None, int]
"""A group's value for a node, None if unreadable, and the revision of its key."""

ROUND_S = 0.2
"""Changes within this time are combined into one write for each node and group."""
REST = 10
"""After a round, the task rests for this multiple of its computing time, so that it takes a tenth
of a CPU. The time in which the task waits for the bus does not count as computing time: an outage
of the bus must not make groups late for ten times its length."""
AT_ONCE, AT_ONCE_BYTES = 256, 1024 * 1024
"""Limits of the writes that are sent together, and of their bytes. Sending writes together saves
round trips. Higher limits would delay the writes of other tasks."""
AGAIN_S = 2.0
IDLE_S = 30.0
KEPT_S = 60.0
"""A key stays for this time after its group's last member has left the node. A create that saw
that member does not write the key, and relies on it for up to 5 s."""


def membership(fleet: Fleet) -> Membership:
    """Return the current members of all groups."""
    return Membership(fleet.vms.values(), fleet.statuses, fleet.groups)


class GroupKeys:
    """The keys that the records of VMs need on their nodes."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def writes(self, after: VmRecord | None) -> list[Write]:
        """Return writes of the group keys that the node of the record `after` lacks.

        Most nodes lack no key. Two kinds of existing keys are written again:
        - The group has no member on the node: the leader may be about to purge the key, and the
          write makes the purge conflict.
        - The key has an old version of the group, whose selector may not select this VM.
        """
        if after is None or after.node == UNPLACED or after.ending:
            return []
        groups, found = self._fleet.groups, []
        members: Membership | None = None
        for group in tuple(groups.of_vm(after)):
            key = subjects.node_group(after.node, group.namespace, group.name)
            known, _ = groups.on_nodes.get(key, (None, 0))
            current = known is not None and _age(known) == _age(group)
            if current and self._has_member(group, after.node):
                continue
            entry = await self._bus.get(key)
            members = members or membership(self._fleet)
            for _ in members.gathered([group]):
                await asyncio.sleep(0)
            value = members.on_node(group, after.node)
            found.append(Write(key, encode(value), expect=entry.revision if entry else 0))
        return found

    def _has_member(self, group: SecurityGroupRecord, node: str) -> bool:
        """Return True if the group selects a VM on the node: then the leader keeps the key."""
        vms = self._fleet.vms.values()
        return any(held.record.node == node and selects(group, held.record) for held in vms)


def _age(group: NodeGroup | SecurityGroupRecord) -> tuple[str, int]:
    return group.uid, group.generation


class _Writes:
    """A batch of values, each with its key and the expected revision of the key (0: unknown)."""

    def __init__(self) -> None:
        self._size = 0
        self._due: list[tuple[str, bytes, int]] = []

    def add(self, key: str, value: NodeGroup, revision: int) -> None:
        body = encode(value)
        self._due.append((key, body, revision))
        self._size += len(body)

    @property
    def is_full(self) -> bool:
        return len(self._due) >= AT_ONCE or self._size >= AT_ONCE_BYTES

    def take(self) -> list[tuple[str, bytes, int]]:
        taken, self._due, self._size = self._due, [], 0
        return taken


class NodeGroups:
    """The leader task that keeps the group keys of all nodes current."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._wake = asyncio.Event()
        self._done: tuple[int, int, int] | None = None
        """The revisions that the last complete round saw; None: the next round is due."""
        self._busy_s = 0.0
        """The computing time of the last round."""
        self._unneeded_s: dict[str, float] = {}
        """By key: the loop's time at which a round first found no member on the node."""

    def wake(self) -> None:
        """Start a round if VMs, statuses or groups have changed since the last complete round."""
        if self._due():
            self._wake.set()

    def _due(self) -> bool:
        groups = self._fleet.groups
        return bool(groups.count() or groups.on_nodes) and self._seen() != self._done

    def _seen(self) -> tuple[int, int, int]:
        fleet = self._fleet
        return fleet.revision, fleet.status_revision, fleet.groups.seen

    async def run(self, tenure: LeaderTerm) -> NoReturn:
        """Write the keys that differ, while the fleet lease is held."""
        self._done = None
        while True:
            self._wake.clear()
            self._busy_s = 0.0
            if self._due() or self._unneeded_s:
                seen = self._seen()
                self._done = seen if await self._round(tenure) else None
            await asyncio.sleep(max(ROUND_S, REST * self._busy_s))
            await wait_for_event(self._wake, 0.0 if self._due() else IDLE_S)

    async def _round(self, tenure: LeaderTerm) -> bool:
        """Write each key that differs; return False if a write conflicted and must be repeated.

        A round of a large fleet takes seconds, so the loop runs other tasks between the steps.
        """
        members, wanted, complete = membership(self._fleet), set[str](), True
        before = dict(self._fleet.groups.on_nodes)
        groups = [held.record for held in self._fleet.groups.listed(None)]
        for _ in self._timed(members.gathered(groups)):
            await asyncio.sleep(0)
        due = _Writes()
        try:
            for key, value in self._timed(members.wanted()):
                wanted.add(key)
                there, revision = self._fleet.groups.on_nodes.get(key, (None, 0))
                if there != value:
                    due.add(key, value, revision)
                if due.is_full:
                    complete &= await self._put_all(due, tenure)
                await asyncio.sleep(0)
            # Creates may have written keys since `before` was copied: these keys must stay.
            left = {key: held for key, held in before.items() if key not in wanted}
            for former in self._former(members, left):
                due.add(*former)
            complete &= await self._put_all(due, tenure)
            for key in self._over(left):
                tenure.check()
                complete &= await self._end(key, left[key][1])
        except BusError as error:
            log.info("groups of nodes are late: %s", error, extra={"code": "groups_late"})
            await asyncio.sleep(AGAIN_S)
            return False
        return complete

    def _timed(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the steps of a computation, and add their computing time to `_busy_s`."""
        time = asyncio.get_running_loop().time
        while True:
            began_s = time()
            try:
                step = next(steps)
            except StopIteration:
                return
            finally:
                self._busy_s += time() - began_s
            yield step

    def _former(
        self, members: Membership, left: Mapping[str, StoredValue]
    ) -> list[tuple[str, NodeGroup, int]]:
        """Return outdated keys of nodes without a member: key, new value and expected revision.

        Without this write, a group that now selects other VMs would still apply to its former
        members on the node.
        """
        found = []
        for key, (there, revision) in sorted(left.items()):
            node, group = group_of_node_group(key)
            held = self._fleet.groups.at(group)
            if held is not None and not self._fleet.damaged.has(group):
                value = members.on_node(held.record, node)
                if there != value:
                    found.append((key, value, revision))
        return found

    async def _put_all(self, due: _Writes, tenure: LeaderTerm) -> bool:
        """Send all writes together; return False if a write conflicted."""
        tenure.check()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._put(*one)) for one in due.take()]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return all(task.result() for task in tasks)

    async def _put(self, key: str, body: bytes, revision: int) -> bool:
        try:
            if revision == 0:
                entry = await self._bus.get(key)
                revision = entry.revision if entry is not None else 0
            self._fleet.groups.put(key, body, await self._bus.put(key, body, expect=revision))
        except ConflictError:
            return False  # another controller was first; the watch delivers its write
        except OversizeError as error:  # other groups must not wait for this group
            log.error("%s is not written: %s", key, error, extra={"code": "group_too_large"})
        return True

    def _over(self, left: Mapping[str, StoredValue]) -> list[str]:
        """Return the keys whose group is deleted, or has had no member on the node for KEPT_S.

        A key stays while the record of its group, or of a VM on its node, is unreadable: guests
        may depend on the key.
        """
        now_s, groups, found = asyncio.get_running_loop().time(), self._fleet.groups, []
        damaged = self._fleet.damaged
        blind = damaged.nodes_of_records()
        self._unneeded_s = {key: self._unneeded_s.get(key, now_s) for key in left}
        for key, since_s in self._unneeded_s.items():
            node, group = group_of_node_group(key)
            if damaged.has(group) or node in blind:
                self._unneeded_s[key] = now_s
            elif groups.at(group) is None or now_s - since_s >= KEPT_S:
                found.append(key)
        return found

    async def _end(self, key: str, revision: int) -> bool:
        try:
            ended = await self._bus.purge(key, expect=revision, marker_ttl_s=MARKER_TTL_S)
        except ConflictError:
            return False
        self._fleet.groups.purge(key, ended)
        self._unneeded_s.pop(key, None)
        return True
