"""VMs that their nodes hold: the bus has lost their records, and only a person ends them."""

from collections.abc import Iterable, Mapping

from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm import VmStatus

HELD = "Held"
ALARM = (
    "{node} holds {count} VM(s) of which the bus has no record; nothing ends them but a person: "
    "virtbus node quarantine list {node}"
)


def is_held(status: VmStatus) -> bool:
    """Return True if the node says that it neither starts nor ends the VM."""
    return any(one.type == HELD and one.status for one in status.conditions)


def held_on(
    uid: str, nodes: Iterable[str], statuses: Mapping[tuple[str, str], tuple[VmStatus, int]]
) -> str:
    """Return the first of `nodes` that holds a VM; empty if none does."""
    told = ((node, statuses.get((node, uid))) for node in nodes)
    return next((node for node, one in told if one is not None and is_held(one[0])), "")


def held_alarms(nodes: Iterable[NodeRecord]) -> tuple[str, ...]:
    """Return a sentence for each node that holds VMs without a record."""
    holding = sorted((one.node, one.held) for one in nodes if one.held)
    return tuple(ALARM.format(node=node, count=count) for node, count in holding)
