"""Collects the hosts' copies of security groups for `bus.rebuild`; writes back accepted groups."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.group_rebuild import (
    Accepted,
    GroupAction,
    HostedGroup,
    Known,
    digest_of,
    lost_groups,
    rebuilt,
)
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.group_api import group_writes
from virtbus.controller.edge.key_states import purged
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.group_rebuild import GroupsRead, KnownGroups, RebuiltGroup
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.wire import encode, validate

log = logging.getLogger(__name__)

ASK_S = 5.0
NODE_S = 10.0
"""Time limit for all pages of a node. A hostile node could answer slowly with tiny pages."""
AT_ONCE = 64
"""Limit of concurrent requests to nodes, and of concurrent reads of groups on the bus."""
GROUPS_MAX = 5000
"""Limit of the groups that are read from a host. A hostile host could report any number."""
NAMES_SHOWN = 10
SHOWN_BYTES = 256 * 1024
"""The size limit of the groups in an answer."""
DONE = {GroupAction.ADD: EventKind.GROUP_CREATED, GroupAction.RAISE: EventKind.GROUP_UPDATED}
Name = tuple[str, str]


class RebuiltGroups(NamedTuple):
    """The security groups in the answer of `bus.rebuild`.

    `message` says why groups may be missing; "" if none is.
    """

    groups: tuple[RebuiltGroup, ...]
    omitted: int
    """The number of groups that do not fit in the answer."""
    message: str


class GroupRebuild:
    """Rebuilds security groups. A rebuild may be interrupted at any step, and repeated."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._writes = group_writes(bus)

    async def rebuild(
        self, nodes: Collection[str], accepted: Accepted, until_s: float, *, dry: bool
    ) -> RebuiltGroups:
        """Find groups that the bus lacks or has in an older version; write back accepted groups.

        With `dry`, nothing is written. The call ends at `until_s` (loop's time), and returns the
        groups that it has found by then. A silent node counts as a node without groups; its groups
        stay in force on the node.
        """
        now_s = asyncio.get_running_loop().time()
        reports, silent = await self._ask(nodes, now_s + (until_s - now_s) / 2)
        bus, unread = await self._known(_by_urgency(reports, accepted), until_s)
        steps = lost_groups(reports, bus, accepted)
        if not dry:
            steps = [await self._do(step, bus[_name(step.group)], until_s) for step in steps]
        return _answer(steps, "; ".join(filter(None, (_unheard(silent), unread))))

    # --- collect ---------------------------------------------------------------------------------
    async def _ask(
        self, nodes: Collection[str], until_s: float
    ) -> tuple[dict[str, list[NodeGroup]], list[str]]:
        """Return the groups that each node lists, and the nodes whose list is incomplete.

        A group that a node reports under another key than its own is left out.
        """
        found: dict[str, dict[str, NodeGroup]] = {node: {} for node in nodes}
        silent, turns = set(nodes), asyncio.Semaphore(AT_ONCE)

        async def ask(node: str) -> None:
            try:
                async with turns, asyncio.timeout(NODE_S):
                    await self._report(node, found[node])
                silent.discard(node)
            except (BusError, VirtbusError, TimeoutError) as error:
                log.info("no groups of %s: %s", node, error, extra={"code": "groups_unheard"})

        await _work_until(until_s, [ask(node) for node in nodes])
        reports = {
            node: [group for key, group in groups.items() if key == _key(node, group)]
            for node, groups in found.items()
        }
        return reports, sorted(silent)

    async def _report(self, node: str, found: dict[str, NodeGroup]) -> None:
        subject = subjects.rpc(node, "netd", "groups")
        after, more = "", True
        while more:
            answer = await self._bus.request(subject, GroupsRead(after=after), timeout_s=ASK_S)
            page = validate(KnownGroups, answer)
            found |= page.groups
            last = max(page.groups, default="")
            more = page.more and last > after and len(found) < GROUPS_MAX
            after = last

    async def _known(self, names: Sequence[Name], until_s: float) -> tuple[dict[Name, Known], str]:
        """Return the bus's versions of these groups, and a message if some were not looked up.

        A group that was deleted on this bus, or is unreadable, is left out.
        """
        known: dict[Name, Known] = {}
        left, failed, read = iter(names), list[BusError | VirtbusError](), 0

        async def work() -> None:
            nonlocal read
            for name in left:
                try:
                    await self._look_up(name, known)
                except (BusError, VirtbusError) as error:
                    failed.append(error)
                    return
                read += 1

        await _work_until(until_s, [work() for _worker in range(min(AT_ONCE, len(names)))])
        if read == len(names):
            return known, ""
        why = str(failed[0]) if failed else "no time was left"
        return known, f"{len(names) - read} group(s) were not compared with the bus: {why}; repeat"

    async def _look_up(self, name: Name, known: dict[Name, Known]) -> None:
        """Add the bus's version of a group to `known`, None if the bus has never had the group.

        A group that was deleted on this bus, or is unreadable, is not added.
        """
        try:
            held = await self._writes.latest(*name)
        except UnreadableValueError:
            return  # a person has to replace or delete the group
        if held is None and purged(await self._bus.get(subjects.security_group(*name))):
            return
        known[name] = held

    # --- apply -----------------------------------------------------------------------------------
    async def _do(self, step: HostedGroup, known: Known, until_s: float) -> HostedGroup:
        """Write the group of an accepted step; return a CONFLICT step if the write fails."""
        if step.step not in DONE:
            return step
        record = rebuilt(step.group, known, self._bus.sources.time_ns())
        try:
            async with asyncio.timeout_at(until_s):
                if known is None:
                    held, _ = await self._writes.create(record)
                else:
                    held = await self._writes.replace(known, record)
        except TimeoutError:
            return step._replace(step=GroupAction.CONFLICT, why="no time was left; repeat")
        except (BusError, VirtbusError) as error:
            return step._replace(step=GroupAction.CONFLICT, why=f"{error}; repeat")
        self._fleet.groups.apply(held)
        self._events.named(DONE[step.step], held.record, held.revision, "written back")
        return step


async def _work_until(until_s: float, works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines in parallel; cancel those that still run at `until_s` (loop's time)."""
    async with background() as tasks:
        for work in works:
            tasks.start(work)
        await tasks.settle(max(0.0, until_s - asyncio.get_running_loop().time()))


def _by_urgency(reports: Mapping[str, Sequence[NodeGroup]], accepted: Accepted) -> list[Name]:
    """Return the names of all groups: accepted groups first, then round-robin over the nodes.

    This order keeps a host that invents names from displacing the groups of other hosts.
    """
    wanted = {(namespace, name) for _, namespace, name in accepted}
    ranks: dict[Name, int] = {}
    for groups in reports.values():
        for rank, group in enumerate(groups):
            name = _name(group)
            ranks[name] = min(rank, ranks.get(name, rank))
    return sorted(ranks, key=lambda name: (name not in wanted, ranks[name], name))


def _unheard(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    names = ", ".join(nodes[:NAMES_SHOWN])
    more = f" and {len(nodes) - NAMES_SHOWN} more" if len(nodes) > NAMES_SHOWN else ""
    return f"netd did not list all groups of {names}{more}"


def _name(group: NodeGroup) -> Name:
    return group.namespace, group.name


def _key(node: str, group: NodeGroup) -> str:
    return subjects.node_group(node, group.namespace, group.name)


def _answer(steps: Collection[HostedGroup], message: str) -> RebuiltGroups:
    """Return the steps that fit in an answer; added and raised groups come first."""
    shown: list[RebuiltGroup] = []
    left_bytes = SHOWN_BYTES
    for step in sorted(steps, key=lambda one: one.step not in DONE):
        group = _shown(step)
        left_bytes -= len(encode(group))
        if left_bytes < 0:
            break
        shown.append(group)
    return RebuiltGroups(tuple(shown), len(steps) - len(shown), message)


def _shown(step: HostedGroup) -> RebuiltGroup:
    group = step.group
    return RebuiltGroup(
        namespace=group.namespace,
        name=group.name,
        nodes=step.nodes,
        step=str(step.step),
        digest=digest_of(group),
        message=step.why,
        spec=group.spec,
    )
