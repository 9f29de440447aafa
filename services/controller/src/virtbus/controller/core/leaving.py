"""VMs that change their node: which may, what they are afterwards, and where they go (ADR 0014)."""

from collections.abc import Iterable
from dataclasses import replace

from virtbus.controller.core.placement import Candidate, demand_of, memory_of, place
from virtbus.controller.core.promises import takes_room
from virtbus.schemas.node import Fence
from virtbus.schemas.vm import EvictionStrategy, RunStrategy, VmRecord, VmStatus

STAYS: dict[EvictionStrategy, str] = {
    EvictionStrategy.EXTERNAL: (
        "its eviction strategy is External: whoever runs it moves it (`virtbus vm move`)"
    ),
    EvictionStrategy.LIVE_MIGRATE: (
        "its eviction strategy is LiveMigrate, and no running guest can be moved yet; "
        "`virtbus vm move` stops it"
    ),
}


def stays(record: VmRecord, *, discard: bool) -> str:
    """Why a VM does not leave by itself; empty where it may.

    Its disks are on its node only: without the user's word, in its spec or as `discard`, a VM
    that may have written to them stays.
    """
    strategy = record.spec.eviction_strategy
    if strategy is not None:
        return STAYS.get(strategy, "")
    return "" if discard else loses(record)


def loses(record: VmRecord) -> str:
    """What a VM would lose by leaving, and how to allow that; empty where nothing."""
    disks = record.spec.local_disks
    if not disks:
        return ""
    names = ", ".join(disks)
    return (
        f"its disks are on this node ({names}); --discard-local-disks gives up what is on them, "
        "and so does eviction_strategy None in its spec"
    )


def fenced(record: VmRecord, fence: Fence) -> str:
    """What becomes of a VM whose node is off for sure."""
    why = "" if record.leaving else stays(record, discard=fence.discard_local_disks)
    if not why:
        return f"{record.node} is fenced; the VM starts on the next node that can take it"
    return (
        f"{record.node} is fenced, and the VM waits for it: {why}; to start it elsewhere: "
        f"`virtbus vm move {record.name} --discard-local-disks`"
    )


def runs_after(record: VmRecord, status: VmStatus | None) -> bool:
    """Whether the VM shall run on its next node: what has ended by itself does not run again.

    A status from before the last start says nothing about that start.
    """
    return record.spec.run_strategy is not RunStrategy.ONCE and up(record, status)


def up(record: VmRecord, status: VmStatus | None) -> bool:
    """True for a VM that is on and has not ended by itself: it runs, or is on its way there."""
    asked = record.epoch, record.power_epoch
    told = status if status is not None and (status.epoch, status.power_epoch) == asked else None
    return record.powered and (told is None or not told.ended)


def leaving(record: VmRecord, status: VmStatus | None, to: str | None) -> VmRecord:
    """The record from which its node learns that it leaves."""
    update = {"leaving": True, "leaving_to": to, "powered": runs_after(record, status)}
    return record.model_copy(update=update)


def moved(record: VmRecord, node: str) -> VmRecord:
    """The record on its new node: a higher epoch, so nobody acts on the old one any more (I15)."""
    update = {"node": node, "epoch": record.epoch + 1, "leaving": False, "leaving_to": None}
    return record.model_copy(update=update)


def let_go(record: VmRecord, status: VmStatus | None) -> bool:
    """True when its node has said that nothing of this assignment is left there."""
    return status is not None and status.released and status.epoch >= record.epoch


class Places:
    """Where VMs that leave can go; each place that was given counts for the next."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._nodes = {candidate.record.node: candidate for candidate in candidates}
        self._hopeless: dict[tuple[object, ...], str] = {}
        """Whom nobody could take: places only become fewer, so nobody can take their like."""

    def find(self, record: VmRecord, *, home: bool = False) -> tuple[str, str]:
        """A node and "", or "" and why there is none; with `home` its own node is the last choice.

        A VM that was asked to go to a certain node goes there, or (with `home`) nowhere.
        """
        goal = (record.node, record.leaving_to, home)
        like = (demand_of(record.spec), takes_room(record), record.reserved, *goal)
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
        if record.leaving_to is not None:
            others = [c for c in others if c.record.node == record.leaving_to]
        how = {"powered": takes_room(record), "strict": record.reserved}
        placement = place(record.spec, others, **how)
        if not placement.nodes and home and record.node in self._nodes:
            placement = place(record.spec, [self._nodes[record.node]], **how)
        if placement.nodes:
            return placement.nodes[0], ""
        refused = dict(placement.refused)
        if record.leaving_to is not None and record.leaving_to not in self._nodes:
            refused[record.leaving_to] = "is not there"
        why = "; ".join(f"{node} {reason}" for node, reason in sorted(refused.items()))
        return "", "no node can take it: " + (why or "there is no other")

    def open(self, node: str) -> bool:
        """True for a node that is known and takes VMs."""
        there = self._nodes.get(node)
        return there is not None and not there.cordoned and not there.silent

    def keep(self, node: str, record: VmRecord) -> None:
        """Count a VM that will come to `node`; one that is off takes only its disks' room."""
        there, on = self._nodes[node], takes_room(record)
        self._nodes[node] = replace(
            there,
            vms=there.vms + 1,
            fresh_vms=there.fresh_vms + 1,
            vcpus=there.vcpus + (record.spec.domain.cpu.vcpus if on else 0),
            memory_bytes=there.memory_bytes + (memory_of(record.spec) if on else 0),
        )
