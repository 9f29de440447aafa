"""Handles `node.audit`: requests an audit from each agent, and limits the answer's size."""

import asyncio
from collections.abc import Iterator

from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import BusError
from virtbus.controller.core.claims import addresses_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import node_not_found
from virtbus.controller.edge.snapshot_orphans import SnapshotOrphans
from virtbus.controller.edge.volume_orphans import VolumeOrphans
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeAudit, NodeAudited, NodeFindings
from virtbus.schemas.audit import Audit, Audited, AuditFinding
from virtbus.schemas.errors import VirtbusError, quotable
from virtbus.schemas.wire import validate

FINDINGS_SHOWN = 400
"""Limit of findings in one answer, divided equally among the nodes. Each node may have one."""
TEXT_CHARS = 200
ANSWER_S = 60.0
"""Time limit of an agent's answer. A repair ends guests, and waits for netd and imaged."""


class Audits:
    """The handler of `node.audit`."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._orphans = VolumeOrphans(bus, fleet)
        self._snapshots = SnapshotOrphans(bus, fleet.volumes.snapshots)

    async def audit(self, request: Request) -> NodeAudited:
        want = validate(NodeAudit, request.data)
        if want.node is not None and not self._fleet.has_node(want.node):
            raise node_not_found(want.node)
        nodes = [want.node] if want.node is not None else self._fleet.known_nodes()
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._ask(node, request.deadline_s, repair=want.repair))
                for node in nodes
            ]
        most = max(1, FINDINGS_SHOWN // max(1, len(asked)))
        return NodeAudited(nodes=tuple(_shown(task.result(), most) for task in asked))

    async def _ask(self, node: str, deadline_s: float, *, repair: bool) -> NodeFindings:
        left_s = max(deadline_s - asyncio.get_running_loop().time() - 1.0, 1.0)
        try:
            answer = await self._bus.request(
                subjects.rpc(node, "agent", "audit"),
                Audit(repair=repair, statuses=self._statuses_without_record(node)),
                timeout_s=min(left_s, ANSWER_S),
            )
            found = (*validate(Audited, answer).findings, *await self._of_objects(node))
            found += tuple(self._unclaimed(node))
        except VirtbusError as error:
            return NodeFindings(node=node, message=str(error))
        except BusError as error:
            message = f"its agent does not answer ({error}); see `virtbus status`"
            return NodeFindings(node=node, message=message)
        return NodeFindings(node=node, findings=found)

    async def _of_objects(self, node: str) -> list[AuditFinding]:
        """Return the findings about volumes and snapshots.

        The list is empty if imaged does not answer, because the agent reports that.
        """
        try:
            volumes = await self._orphans.findings(node)
            return volumes + await self._snapshots.findings(node)
        except (BusError, VirtbusError):
            return []

    def _unclaimed(self, node: str) -> Iterator[AuditFinding]:
        """Yield each address of the node's VMs that has no claim, or a claim of another VM."""
        for uid, held in self._fleet.vms.items():
            for key in addresses_of(held.record) if held.record.node == node else ():
                claim = self._fleet.claims.get(key)
                if claim is None or claim.uid != uid:
                    _, address = subjects.claimed_address(key)
                    whose = f"VM {claim.uid} claims it" if claim is not None else "nobody claims it"
                    what = f"the address {address}: {whose}; virtbus bus rebuild"
                    yield AuditFinding(kind="bus", uid=uid, what=what)

    def _statuses_without_record(self, node: str) -> tuple[str, ...]:
        """Return the uids with a status of the node and without a record on the node."""
        return tuple(
            uid
            for there, uid in self._fleet.statuses
            if there == node
            and (uid not in self._fleet.vms or self._fleet.vms[uid].record.node != node)
        )


def _shown(one: NodeFindings, most: int) -> NodeFindings:
    """Return the result with at most `most` findings, and with shortened texts."""
    more = len(one.findings) - most
    message = f"{more} more are not listed; repair these, then repeat" if more > 0 else one.message
    return NodeFindings(
        node=one.node,
        findings=tuple(_cut(found) for found in one.findings[:most]),
        message=quotable(message, TEXT_CHARS),
    )


def _cut(found: AuditFinding) -> AuditFinding:
    texts = {name: getattr(found, name) for name in ("kind", "uid", "what", "repair")}
    return found.model_copy(update={k: quotable(v, TEXT_CHARS) for k, v in texts.items()})
