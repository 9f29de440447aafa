"""Decides which VMs may leave a node, and computes their records and targets (ADR 0014)."""

from collections.abc import Iterable, Sequence

from virtbus.bus.client.owners import node_of
from virtbus.controller.core.allocations import takes_room, with_vm
from virtbus.controller.core.demand import demand_of_vm
from virtbus.controller.core.placement import Candidate, Placement
from virtbus.controller.core.pools import Needs, needs_of_shared
from virtbus.controller.core.volume_placement import Home, place_near
from virtbus.schemas.host_paths import host_paths
from virtbus.schemas.node import Fence
from virtbus.schemas.pool import ABILITIES
from virtbus.schemas.vm import EvictionStrategy, RunStrategy, VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.volume_ref import VolumeRef

STAYS: dict[EvictionStrategy, str] = {
    EvictionStrategy.EXTERNAL: (
        "its eviction strategy is External: an external controller moves it (`virtbus vm move`)"
    ),
    EvictionStrategy.LIVE_MIGRATE: (
        "its eviction strategy is LiveMigrate, and no running guest can be moved yet; "
        "`virtbus vm move` stops it"
    ),
}


def eviction_blocked_reason(record: VmRecord, *, discard: bool) -> str:
    """Return why a drain or fence does not move a VM; empty if it may leave.

    A VM's own disks exist on its node only. A VM that may have written to them stays, unless its
    spec or `discard` permits their loss. A VM with a volume on the node always stays. Volumes of
    pools on a server move with the VM.
    """
    if why := data_stays(record):
        return why
    strategy = record.spec.eviction_strategy
    if strategy is not None:
        return STAYS.get(strategy, "")
    return "" if discard else data_loss_reason(record)


def data_stays(record: VmRecord) -> str:
    """Return why a VM must stay on its node, for example because of volumes; empty if it may leave.

    A VM of a node's container runtime runs on that node only. A volume of a pool on a server does
    not bind its VM, because several nodes reach the volume. A directory that the guest only reads
    does not bind its VM either, because other nodes may offer the directory.
    """
    if why := bound_to_host(record):
        return why
    names = [ref.name for ref in local_volumes(record)]
    if not names:
        return ""
    return (
        f"its volumes are on this node ({', '.join(names)}); while it is off, `virtbus volume move "
        f"{names[0]} --node NODE` moves it with all of them, and `virtbus volume detach` takes "
        "them from it"
    )


def bound_to_host(record: VmRecord) -> str:
    """Return why a VM is bound to its node by things other than disks and volumes; empty if not."""
    if record.node == node_of(record.owner):
        return (
            f"the container runtime of {record.node} made it for a pod; delete the pod to run it "
            "on another node"
        )
    if written := ", ".join(one.path for one in host_paths(record.spec) if one.written):
        return (
            f"it writes to directories or files of this node ({written}); create it again to run "
            "it on another node"
        )
    return ""


def local_volumes(record: VmRecord) -> list[VolumeRef]:
    """Return the volumes of a VM whose data exists on its node only."""
    return [ref for ref in record.volume_refs.values() if not ABILITIES[ref.kind].shared]


def data_loss_reason(record: VmRecord) -> str:
    """Return which disks a move would lose, and how to permit the loss; empty if it loses none."""
    disks = record.spec.local_disks
    if not disks:
        return ""
    names = ", ".join(disks)
    return (
        f"its disks are on this node ({names}); --discard-local-disks gives up what is on them, "
        "and so does eviction_strategy None in its spec"
    )


def fenced(record: VmRecord, fence: Fence) -> str:
    """Return a message for users: the VM waits for its fenced node, or starts elsewhere."""
    why = (
        ""
        if record.evacuating
        else eviction_blocked_reason(record, discard=fence.discard_local_disks)
    )
    if stays := data_stays(record):
        return f"{record.node} is fenced, and the VM waits for it: {stays}"
    if not why:
        return f"{record.node} is fenced; the VM starts on the next node that can take it"
    return (
        f"{record.node} is fenced, and the VM waits for it: {why}; to start it elsewhere: "
        f"`virtbus vm move {record.name} --discard-local-disks`"
    )


def runs_after(record: VmRecord, status: VmStatus | None) -> bool:
    """Return True if the VM should run on its next node.

    A VM stays off if it has ended by itself. A VM with the run strategy Once starts on one node
    only.
    """
    return record.spec.run_strategy is not RunStrategy.ONCE and up(record, status)


def up(record: VmRecord, status: VmStatus | None) -> bool:
    """Return True if the VM is powered and has not ended by itself: it runs or is starting.

    A status of an earlier epoch or power epoch does not count.
    """
    asked = record.epoch, record.power_epoch
    current = status if status is not None and (status.epoch, status.power_epoch) == asked else None
    return record.powered and (current is None or not current.ended)


def evacuating(record: VmRecord, status: VmStatus | None, to: str | None) -> VmRecord:
    """Return the record that makes the node end the guest and release the VM."""
    update = {"evacuating": True, "evacuation_target": to, "powered": runs_after(record, status)}
    return record.model_copy(update=update)


def moved(record: VmRecord, node: str) -> VmRecord:
    """Return the record for the new node. Its higher epoch stops the old node (invariant I15)."""
    update = {
        "node": node,
        "epoch": record.epoch + 1,
        "evacuating": False,
        "evacuation_target": None,
    }
    return record.model_copy(update=update)


def released_by_node(record: VmRecord, status: VmStatus | None) -> bool:
    """Return True if the node has reported that it keeps nothing of the VM's current assignment."""
    return status is not None and status.released and status.epoch >= record.epoch


def _needs(record: VmRecord) -> Needs:
    """Return the pools that the VM's next node must have, because volumes move with the VM."""
    return needs_of_shared(record.volume_refs.values())


def _placement(record: VmRecord, nodes: Sequence[Candidate]) -> Placement:
    needs = _needs(record)
    home = Home("", "", needs) if needs else None
    how = {"powered": takes_room(record), "strict": record.reserved}
    return place_near(record.spec, nodes, home, want=demand_of_vm(record), **how)


class EvacuationTargets:
    """Finds targets for evacuated VMs. Each placed VM counts when the next VM is placed."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._nodes = {candidate.record.node: candidate for candidate in candidates}
        self._hopeless: dict[tuple[object, ...], str] = {}
        """Demands that no node can take, with the reason. Free capacity only shrinks while this
        object exists, so a later VM with the same demand gets the same reason."""

    def find(self, record: VmRecord, *, home: bool = False) -> tuple[str, str]:
        """Return a target node and "", or "" and the reason why no node can take the VM.

        With `home`, the VM's own node is the last choice. If the VM has a requested target, no
        node except that target (and with `home` its own node) is tried.
        """
        goal = (record.node, record.evacuation_target, home, _needs(record))
        like = (
            demand_of_vm(record),
            takes_room(record),
            record.reserved,
            *goal,
        )
        if like in self._hopeless:
            return "", self._hopeless[like]
        node, why = self._found(record, home=home)
        if node:
            self.keep(node, record)
        else:
            self._hopeless[like] = why
        return node, why

    def _found(self, record: VmRecord, *, home: bool) -> tuple[str, str]:
        others = [c for name, c in self._nodes.items() if name != record.node]
        if record.evacuation_target is not None:
            others = [c for c in others if c.record.node == record.evacuation_target]
        placement = _placement(record, others)
        if not placement.nodes and home and record.node in self._nodes:
            placement = _placement(record, [self._nodes[record.node]])
        if placement.nodes:
            return placement.nodes[0], ""
        refused = dict(placement.refused)
        if record.evacuation_target is not None and record.evacuation_target not in self._nodes:
            refused[record.evacuation_target] = "is not there"
        why = "; ".join(f"{node} {reason}" for node, reason in sorted(refused.items()))
        return "", "no node can take it: " + (why or "there is no other")

    def open(self, node: str) -> bool:
        """Return True if the node is known, is not cordoned, and is not silent."""
        there = self._nodes.get(node)
        return there is not None and not there.cordoned and not there.silent

    def keep(self, node: str, record: VmRecord) -> None:
        """Count a VM as allocated on the node where it will start."""
        self._nodes[node] = with_vm(self._nodes[node], record)
