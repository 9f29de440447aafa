"""Collects the security groups of hosts for `bus.rebuild`, and writes back the accepted ones."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.group_rebuild import (
    GroupAction,
    HostedGroup,
    Known,
    accepted_copies,
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
GROUPS_MAX = 5000
"""The groups of one host that are read. A hostile one could report any number."""
SHOWN_BYTES = 256 * 1024
"""The size limit of the groups in an answer."""
DONE = {GroupAction.ADD: EventKind.GROUP_CREATED, GroupAction.RAISE: EventKind.GROUP_UPDATED}


class GroupRebuild:
    """The groups' part of a rebuild. It may be repeated, and interrupted at any step."""

    def __init__(self, bus: Bus, fleet: Fleet, events: FleetEvents) -> None:
        self._bus = bus
        self._fleet = fleet
        self._events = events
        self._writes = group_writes(bus)

    async def rebuild(
        self, nodes: Collection[str], accepted: Collection[str], *, dry: bool
    ) -> tuple[list[RebuiltGroup], int]:
        """Write the accepted groups of these nodes that the bus lacks.

        Return all that it lacks, and the number of those that are left out of the answer. A node
        that does not answer has no groups; its rules stay in force there.
        """
        reports = {node: await self._report(node) for node in nodes}
        bus = await self._known(reports)
        steps = lost_groups(reports, bus, accepted_copies(accepted))
        if not dry:
            steps = [await self._do(step, bus[_name(step.group)]) for step in steps]
        return _answer(steps)

    async def _report(self, node: str) -> list[NodeGroup]:
        """Return all groups of a node, without those that claim to be of another one."""
        subject, found = subjects.rpc(node, "netd", "groups"), dict[str, NodeGroup]()
        after, more = "", True
        try:
            while more:
                answer = await self._bus.request(subject, GroupsRead(after=after), timeout_s=ASK_S)
                page = validate(KnownGroups, answer)
                found |= page.groups
                last = max(page.groups, default="")
                more = page.more and last > after and len(found) < GROUPS_MAX
                after = last
        except (BusError, VirtbusError) as error:
            log.info("no groups of %s: %s", node, error, extra={"code": "groups_unheard"})
        return [group for key, group in found.items() if key == _key(node, group)]

    async def _known(
        self, reports: Mapping[str, Collection[NodeGroup]]
    ) -> dict[tuple[str, str], Known]:
        """Return what the bus has of these groups, without those that were deleted on it."""
        known: dict[tuple[str, str], Known] = {}
        for namespace, name in {_name(one) for groups in reports.values() for one in groups}:
            try:
                held = await self._writes.latest(namespace, name)
            except UnreadableValueError:
                continue  # a person replaces or deletes it
            if held is None:
                entry = await self._bus.get(subjects.security_group(namespace, name))
                if purged(entry):
                    continue
            known[namespace, name] = held
        return known

    async def _do(self, step: HostedGroup, known: Known) -> HostedGroup:
        """Write the group of an accepted step; if that is refused, return a conflict."""
        if step.step not in DONE:
            return step
        record = rebuilt(step.group, known, self._bus.sources.time_ns())
        try:
            if known is None:
                held, _ = await self._writes.create(record)
            else:
                held = await self._writes.replace(known, record)
        except (ConflictError, VirtbusError) as error:
            return replace(step, step=GroupAction.CONFLICT, why=f"{error}; repeat")
        self._fleet.groups.apply(held)
        self._events.named(DONE[step.step], held.record, held.revision, "written back")
        return step


def _name(group: NodeGroup) -> tuple[str, str]:
    return group.namespace, group.name


def _key(node: str, group: NodeGroup) -> str:
    return subjects.node_group(node, group.namespace, group.name)


def _answer(steps: Collection[HostedGroup]) -> tuple[list[RebuiltGroup], int]:
    """Return the steps that fit in an answer, with written groups first, and the number left."""
    shown: list[RebuiltGroup] = []
    left_bytes = SHOWN_BYTES
    for step in sorted(steps, key=lambda one: one.step not in DONE):
        group = _shown(step)
        left_bytes -= len(encode(group))
        if left_bytes < 0:
            break
        shown.append(group)
    return shown, len(steps) - len(shown)


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
