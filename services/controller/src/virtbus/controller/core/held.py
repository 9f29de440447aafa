"""VMs that their nodes hold: the bus has lost their records, and only a person ends them."""

from collections.abc import Iterable, Mapping

from virtbus.schemas.vm import VmStatus

HELD = "Held"


def is_held(status: VmStatus) -> bool:
    """True where the node says that it neither starts nor ends the VM."""
    return any(one.type == HELD and one.status for one in status.conditions)


def held_on(
    uid: str, nodes: Iterable[str], statuses: Mapping[tuple[str, str], tuple[VmStatus, int]]
) -> str:
    """The first of `nodes` that holds a VM; empty: none does."""
    told = ((node, statuses.get((node, uid))) for node in nodes)
    return next((node for node, one in told if one is not None and is_held(one[0])), "")
