"""Makes backups of running guests: imaged has the files, and libvirt the guest (ADR 0068).

The agent stores nothing. It alone knows if QEMU has written all files, so an agent that restarts
lets imaged stage them again. A backup that imaged has stored is found by the next request.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from virtbus.nodeagent import brief_freezes
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_backups import PushState
from virtbus.nodeagent.core.guest_layers import GuestLayers, layers_differ
from virtbus.nodeagent.live_snapshots import UNKNOWN, targets_of
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.backup import BackupWork, bitmap_name
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS

PUSH = STEPS["backup"][1].name
LATER = frozenset({"recovering", UNKNOWN})
"""Reasons of errors after which the step is repeated, and nothing is removed."""
Ask = Callable[[BackupWork], Awaitable[WorkState]]


@dataclass
class _Push:
    """Files that QEMU writes."""

    uid: str
    at_ns: int
    remark: str
    written: bool = False
    seen: PushState = field(default_factory=PushState)


class LiveBackups:
    """The backups of running guests on a node."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools
        self._pushes: dict[str, _Push] = {}
        """By the id of the backup: what this agent has begun."""

    def begun(self, backup: str) -> bool:
        """Return True if this agent has let QEMU begin a backup."""
        return backup in self._pushes

    async def ensure(self, work: BackupWork, guest: ActorState | None, ask: Ask) -> WorkState:
        """Do the next step; return imaged's state. `guest` is None once it has ended.

        Raises:
            VirtbusError: no file and no name of the backup is left. 409 `guest_ended`,
                `push_failed`, `disk_not_switchable`, `layers_differ`; those of imaged and libvirt.
        """
        live = work.model_copy(update={"live": True})
        push = self._pushes.get(work.id)
        try:
            if push is None:
                return await self._begin(live, guest, ask)
            if not push.written and not await self._written(work.id, push):
                return await self._progress(live, push, ask)
            more = {"pushed": True, "at_ns": push.at_ns, "remark": push.remark}
            state = await ask(live.model_copy(update=more))
        except VirtbusError as error:
            if error.reason not in LATER:
                with contextlib.suppress(VirtbusError):  # the next backup removes what stays
                    await self.cancel(live, ask)
                self._pushes.pop(work.id, None)
            raise
        if state.state == "done":
            del self._pushes[work.id]
            with contextlib.suppress(VirtbusError):  # the next backup removes old bitmaps
                await self._tools.backups.keep_only(push.uid, {bitmap_name(work.id)})
        return state

    async def cancel(self, work: BackupWork, ask: Ask) -> WorkState:
        """End the work, unless imaged has stored the backup; raises VirtbusError as imaged.

        An agent before this one may have begun it. If libvirt does not answer, QEMU writes on to
        files without names, until the guest ends or its next backup begins.
        """
        push = self._pushes.get(work.id)
        if push is None or not push.written:
            with contextlib.suppress(VirtbusError):
                await self._tools.backups.abort(work.uid)
            await self._tools.disks.unpin_backup(work.uid, work.id)
        state = await ask(work.model_copy(update={"do": "cancel"}))
        if state.state == "working":
            return state  # it is being published
        self._pushes.pop(work.id, None)
        if state.state == "none":
            with contextlib.suppress(VirtbusError):  # the next backup removes old bitmaps
                await self._tools.backups.keep_only(work.uid, None, bitmap_name(work.id))
        return state

    # --- steps ------------------------------------------------------------------------------
    async def _begin(self, work: BackupWork, guest: ActorState | None, ask: Ask) -> WorkState:
        backups, uid = self._tools.backups, work.uid
        seen = None if guest is None else await self._tools.layers.look(uid)
        if guest is None or seen is None:
            raise _ended()
        if seen.differs:
            raise layers_differ()
        targets = targets_of(guest, {disk.name for disk in work.disks})
        _refuse_others(targets, seen)
        usable = await backups.bitmaps(uid, targets.values())
        sizes = {name: seen.used[seen.named[targets[name]]] for name in targets}
        disks = [disk.model_copy(update={"size_bytes": sizes[disk.name]}) for disk in work.disks]
        more = {"disks": tuple(disks), "bitmaps": tuple(sorted(usable))}
        state = await ask(work.model_copy(update=more))
        if state.state != "working" or state.step != PUSH:
            return state
        await backups.abort(uid)  # an agent before this one may have begun
        await backups.keep_only(uid, None, bitmap_name(work.id))
        pins: dict[str, str] = {}
        for name, target in targets.items():
            pins[target] = await self._tools.disks.pin_backup(uid, name, work.id)
        push = _Push(uid, 0, "")
        self._pushes[work.id] = push
        push.remark = await brief_freezes.freeze(self._tools.freezes, uid)
        try:
            push.at_ns = self._tools.bus.sources.time_ns()
            await backups.begin(uid, pins, state.parent, bitmap_name(work.id))
        finally:
            if not push.remark:
                await brief_freezes.thaw(self._tools.freezes, uid, "the backup has begun")
        return state

    async def _written(self, backup: str, push: _Push) -> bool:
        """Return True once QEMU has written all files, which imaged can read then.

        Raises:
            VirtbusError: 409 `push_failed`, `guest_ended`.
        """
        try:
            found = await self._tools.backups.progress(push.uid)
        except VirtbusError as error:
            if error.code != Code.UNAVAILABLE:
                raise
            message = f"nobody knows how far the backup is: {error}; the agent repeats this"
            raise VirtbusError(Code.UNAVAILABLE, UNKNOWN, message) from error
        if found.state == "none":
            raise _ended()
        if found.state == "failed":
            message = f"QEMU did not complete the backup: {found.why}; repeat it"
            raise VirtbusError(Code.CONFLICT, "push_failed", message)
        push.seen = found
        if found.state == "done":
            await self._tools.disks.unpin_backup(push.uid, backup)
            push.written = True
        return push.written

    async def _progress(self, work: BackupWork, push: _Push, ask: Ask) -> WorkState:
        """Return the progress of QEMU; imaged checks the free space."""
        state = await ask(work)
        sizes = {"done_bytes": push.seen.done_bytes, "total_bytes": push.seen.total_bytes}
        return state.model_copy(update=sizes)


def _refuse_others(targets: Mapping[str, str], seen: GuestLayers) -> None:
    """Raise 409 if libvirt's XML has no file for a disk, by name with its target."""
    if others := sorted(name for name, target in targets.items() if target not in seen.named):
        message = (
            f"the guest's disk {others[0]} is not a file of the node, so QEMU cannot write its "
            "backup; detach the volume, or use the backups of its storage"
        )
        raise VirtbusError(Code.CONFLICT, "disk_not_switchable", message)


def _ended() -> VirtbusError:
    message = "the guest ended before its disks were copied; repeat the backup"
    return VirtbusError(Code.CONFLICT, "guest_ended", message)
