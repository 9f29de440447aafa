"""Tracks VMs that a node has and the bus has no record of. Only a person ends such VMs."""

from collections.abc import Iterable

from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm_status import VmStatus

HELD = "Held"
ALARM = (
    "{node} holds {count} VM(s) of which the bus has no record; nothing ends them but a person: "
    "virtbus node quarantine list {node}"
)


def is_held(status: VmStatus) -> bool:
    """Return True if the node reports that it neither starts nor ends the VM."""
    return any(one.type == HELD and one.status for one in status.conditions)


class UnrecordedVms:
    """The nodes that have a VM without a record, by uid, because creates look up their own uid."""

    def __init__(self) -> None:
        self._nodes: dict[str, set[str]] = {}

    def note(self, status: VmStatus) -> None:
        if is_held(status):
            self._nodes.setdefault(status.uid, set()).add(status.node)
        else:
            self.forget(status.node, status.uid)

    def forget(self, node: str, uid: str) -> None:
        nodes = self._nodes.get(uid)
        if nodes is not None:
            nodes.discard(node)
            if not nodes:
                del self._nodes[uid]

    def node_of(self, uid: str) -> str:
        """Return the first node that has the VM without a record; empty if no node has it."""
        return min(self._nodes.get(uid, ()), default="")


def held_alarms(nodes: Iterable[NodeRecord]) -> tuple[str, ...]:
    """Return a sentence for each node that holds VMs without a record."""
    holding = sorted((one.node, one.held) for one in nodes if one.held)
    return tuple(ALARM.format(node=node, count=count) for node, count in holding)
