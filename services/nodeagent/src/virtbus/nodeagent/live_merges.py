"""Merges the layers below the disks of running guests, by QEMU's own copy (ADR 0902).

libvirt and QEMU know which files are below a disk, and how far a copy is. So an agent that restarts
continues, and nothing is stored.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.copied_guests import LATER, asked_again, guest_ended
from virtbus.nodeagent.core.guest_layers import layers_differ
from virtbus.nodeagent.live_snapshots import targets_of
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.layer import LAYERS
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS

MERGE = STEPS["flatten"][0].name
Ask = Callable[[FlattenWork], Awaitable[WorkState]]


class LiveMerges:
    """The merges of running guests on a node."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools

    async def do(self, work: FlattenWork, guest: ActorState, ask: Ask) -> WorkState:
        """Let QEMU copy the layers of all disks into these, or end that; return the progress.

        The disks have their content at each instant.

        Raises:
            VirtbusError: no copy is left. 409 `layers_differ`, `disk_not_switchable`; those of
                imaged and libvirt. 503 `guest_unknown`: it has to be repeated.
        """
        if work.do == "cancel":
            return await self._cancel(work, guest)
        try:
            return await self._step(work, guest, ask)
        except VirtbusError as error:
            if error.reason not in LATER:
                await self._cancel(work, guest)
            raise

    async def _cancel(self, work: FlattenWork, guest: ActorState) -> WorkState:
        with asked_again():
            await self._tools.layers.end_pulls(guest.record.uid, _targets(work, guest).values())
        return WorkState(state="none")

    async def _step(self, work: FlattenWork, guest: ActorState, ask: Ask) -> WorkState:
        layers, uid = self._tools.layers, guest.record.uid
        targets = _targets(work, guest)
        with asked_again():
            seen = await layers.look(uid)
        if seen is None:
            raise guest_ended()
        if seen.differs:
            raise layers_differ()
        await ask(work.model_copy(update={"live": True}))  # it checks the free space
        done_bytes = total_bytes = 0
        busy = False
        for target in targets.values():
            below = seen.below.get(target, ())
            with asked_again():
                progress = await layers.pulled(uid, target)
                if progress is None and any(map(_is_layer, below)):
                    base = next((path for path in below if not _is_layer(path)), "")
                    await layers.pull(uid, target, base)
                    progress = 0, 0
            if progress is not None:
                busy = True
                done_bytes, total_bytes = done_bytes + progress[0], total_bytes + progress[1]
        if busy:
            sizes = {"done_bytes": done_bytes, "total_bytes": total_bytes}
            return WorkState(state="working", step=MERGE, **sizes)
        guest.image.reset()  # imaged reports no layers now
        return WorkState(state="done")


def _targets(work: FlattenWork, guest: ActorState) -> Mapping[str, str]:
    """Return libvirt's names of the disks that the guest can write to, by name."""
    record = guest.record
    fixed = {
        disk.name
        for disk in record.spec.domain.devices.disks
        if disk.readonly or disk.device == "cdrom"
    }
    return targets_of(guest, {disk.name for disk in work.disks} - fixed)


def _is_layer(path: str) -> bool:
    return Path(path).parent.name == LAYERS
