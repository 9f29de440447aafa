"""Merges the layers below the disks of running guests with copy jobs of QEMU (ADR 0080).

QEMU reports the files below a disk and the progress of a copy. So the agent stores no progress, and
can continue after its restart.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.copied_guests import LATER, asked_again, unknown
from virtbus.nodeagent.core.addresses import target
from virtbus.nodeagent.core.guest_layers import GuestLayers, is_image
from virtbus.nodeagent.live_snapshots import targets_of
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.disk import DiskBus
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS

MERGE = STEPS["flatten"][0].name
Ask = Callable[[FlattenWork], Awaitable[WorkState]]


@dataclass
class _Merge:
    """The steps of one VM's merge that this agent has done."""

    begun: set[str] = field(default_factory=set)
    """The targets whose copies this agent has begun."""
    gone: set[str] = field(default_factory=set)
    """The targets in `begun` that once had layers and no copy. libvirt may report a copy's end
    late."""
    told: set[str] = field(default_factory=set)
    """The names of the disks that this agent has reported to imaged as merged."""


class LiveMerges:
    """Merges one running guest of a node at a time, because each merge may fill the host's disk."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools
        self._merges: dict[str, _Merge] = {}

    def keep(self, ids: Collection[str]) -> None:
        for id_ in self._merges.keys() - set(ids):
            del self._merges[id_]

    async def do(self, work: FlattenWork, guest: ActorState, ask: Ask) -> WorkState:
        """Let QEMU copy each disk's layers into the disk, or end the copies; return the progress.

        The content that the guest sees never changes.

        Raises:
            VirtbusError: 503 `guest_unknown`, `recovering`: the caller repeats the call. After all
                other errors, the copies are ended. 409 `layers_differ`: libvirt names files that
                the guest does not use. 409 `disk_not_switchable`: a disk is on nvme. 422
                `copy_failed`: a copy ended early. Also the errors of imaged and libvirt.
        """
        if work.do == "cancel":
            return await self._cancel(work, guest, ask)
        try:
            return await self._step(work, guest, ask)
        except VirtbusError as error:
            if error.reason in LATER:
                raise
            try:
                await self._cancel(work, guest, ask)
            except VirtbusError as second:
                if second.reason in LATER:
                    raise  # the next call finds the first error again
            raise

    async def _cancel(self, work: FlattenWork, guest: ActorState, ask: Ask) -> WorkState:
        """End all copies of the guest, also for disks that are not in its record."""
        try:
            await self._tools.layers.end_pulls(guest.record.uid)
        except VirtbusError as error:
            raise unknown(str(error)) from error
        seen = await self._look(guest)
        merge = self._merges.get(work.id) or _Merge()
        await self._tell(work, guest, seen, merge, frozenset(), ask)
        self._merges.pop(work.id, None)
        return WorkState(state="none")

    async def _step(self, work: FlattenWork, guest: ActorState, ask: Ask) -> WorkState:
        _refuse_nvme(work, guest)
        with asked_again():
            pulls = await self._tools.layers.pulls(guest.record.uid)
        seen = await self._look(guest)  # read after `pulls`, to see the result of ended copies
        if self._merges and work.id not in self._merges and not pulls:
            message = "another running VM of this node is merged first"
            return WorkState(state="working", step=MERGE, message=message)
        merge = self._merges.setdefault(work.id, _Merge())
        await self._tell(work, guest, seen, merge, pulls, ask)
        targets = _targets(work, guest, seen)
        resting = {
            name: one
            for name, one in targets.items()
            if one not in pulls and name not in merge.told and seen.layers(one)
        }
        if not pulls and not resting:
            del self._merges[work.id]
            return WorkState(state="done", message=_left_out(work, guest, seen))
        disks = tuple(disk for disk in work.disks if disk.name in resting)
        first = not pulls and not merge.begun
        await ask(work.model_copy(update={"live": True, "disks": disks, "whole": first}))
        for name, one in resting.items():
            await self._pull(guest.record.uid, name, one, seen, merge)
        done_bytes, total_bytes = (
            sum(sizes) for sizes in zip((0, 0), *pulls.values(), strict=True)
        )
        sizes = {"done_bytes": done_bytes, "total_bytes": total_bytes}
        return WorkState(state="working", step=MERGE, **sizes)

    async def _pull(self, uid: str, name: str, one: str, seen: GuestLayers, merge: _Merge) -> None:
        """Begin the copy of a disk without a copy.

        Raises:
            VirtbusError: 422 `copy_failed`: an earlier copy of this disk ended early.
        """
        if one not in merge.begun:
            with asked_again():
                await self._tools.layers.pull(uid, one, seen.image(one))
            merge.begun.add(one)
        elif one not in merge.gone:
            merge.gone.add(one)
        else:
            message = (
                f"QEMU has ended the copy of the disk {name} before its end, and the disk still "
                "rests on its layers; see libvirtd's log on the node"
            )
            raise VirtbusError(Code.UNSUPPORTED, "copy_failed", message)

    async def _tell(
        self,
        work: FlattenWork,
        guest: ActorState,
        seen: GuestLayers,
        merge: _Merge,
        pulls: Collection[str],
        ask: Ask,
    ) -> None:
        """Tell imaged which disks are merged. imaged cannot read a running guest's disk headers."""
        merged = {}
        for name, one in _targets(work, guest, seen).items():
            file = seen.named[one]
            if one in pulls or name in merge.told or seen.used_below.get(file) is None:
                continue
            if all(map(is_image, seen.used_below[file])):
                merged[name] = seen.inodes.get(file, 0)
        if not merged:
            return
        disks = tuple(disk for disk in work.disks if disk.name in merged)
        more = {"do": "ensure", "live": True, "disks": disks, "merged": merged}
        await ask(work.model_copy(update=more))
        merge.told |= merged.keys()
        guest.image.reset()  # imaged now reports these disks without layers

    async def _look(self, guest: ActorState) -> GuestLayers:
        with asked_again():
            seen = await self._tools.layers.look(guest.record.uid)
            if seen is not None and seen.differs:  # a disk may have been attached during the look
                seen = await self._tools.layers.look(guest.record.uid)
        if seen is None:  # the guest has just ended, or is lost while its QEMU copies
            raise unknown("libvirt does not have it")
        return seen


def _names(work: FlattenWork, guest: ActorState) -> dict[str, str]:
    """Return the libvirt target of each disk of the work, by the disk's name.

    Leave out disks on nvme and disks without an address.
    """
    found, wanted = {}, {disk.name for disk in work.disks}
    for disk in guest.record.spec.domain.devices.disks:
        if disk.name in wanted and disk.bus is not DiskBus.NVME:
            with suppress(KeyError):
                found[disk.name] = target(disk, guest.observed.disks.addresses)
    return found


def _targets(work: FlattenWork, guest: ActorState, seen: GuestLayers) -> dict[str, str]:
    return {name: one for name, one in _names(work, guest).items() if one in seen.named}


def _refuse_nvme(work: FlattenWork, guest: ActorState) -> None:
    """Raise 409 `disk_not_switchable` for a disk on nvme, which libvirt does not know."""
    wanted = {disk.name for disk in work.disks}
    disks = guest.record.spec.domain.devices.disks
    targets_of(guest, {one.name for one in disks if one.bus is DiskBus.NVME} & wanted)


def _left_out(work: FlattenWork, guest: ActorState, seen: GuestLayers) -> str:
    """Return a remark about disks that are not merged; "" if all are merged."""
    names, merged = _names(work, guest), _targets(work, guest, seen)
    others = [
        disk.name
        for disk in work.disks
        if disk.name not in merged
        and not all(map(is_image, seen.below.get(names.get(disk.name, ""), ("",))))
    ]
    if not others:
        return ""
    return f"not merged, because the guest cannot write to them now: {', '.join(sorted(others))}"
