"""Makes backups of running guests: imaged keeps the files, libvirt controls the guest (ADR 0068).

The fact that QEMU has written all files is only in the agent's memory. After a restart of the
agent, imaged stages the files again. If imaged has already stored the backup, its next answer has
the state `done`.
"""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from virtbus.nodeagent import brief_freezes
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.copied_guests import (
    LATER,
    CopiedDisks,
    asked_again,
    copied_disks,
    guest_ended,
)
from virtbus.nodeagent.core.guest_backups import PushState
from virtbus.nodeagent.live_snapshots import UNKNOWN
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.backup import BackupWork, bitmap_name
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS

PUSH = STEPS["backup"][1].name
Ask = Callable[[BackupWork], Awaitable[WorkState]]


@dataclass
class _Push:
    """A push that this agent has begun."""

    uid: str
    attempt: str
    at_ns: int = 0
    remark: str = ""
    written: bool = False
    seen: PushState = field(default_factory=PushState)


class LiveBackups:
    """The backups of running guests on a node."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools
        self._pushes: dict[str, _Push] = {}
        """By the id of the backup."""

    def begun(self, backup: str) -> bool:
        """Return True if this agent has let QEMU begin the backup."""
        return backup in self._pushes

    async def ensure(self, work: BackupWork, guest: ActorState | None, ask: Ask) -> WorkState:
        """Do the next step; return imaged's state. `guest` is None if the guest has ended.

        Raises:
            VirtbusError: 503 `guest_unknown`, `recovering`: the caller repeats the step. After all
                other errors, the work is cancelled. 409 `guest_ended`: the guest ended before QEMU
                had written all files. 409 `push_failed`: QEMU failed to write the files. 409
                `disk_not_switchable`: the guest lacks a disk, or libvirt does not know the disk.
                409 `layers_differ`: libvirt names files that the guest does not use. Also the
                errors of imaged and libvirt.
        """
        live = work.model_copy(update={"live": True})
        push = self._pushes.get(work.id)
        try:
            if push is None:
                return await self._begin(live, guest, ask)
            if not push.written and not await self._written(work.id, push):
                return await self._progress(live, push, ask)
            told = {"at_ns": push.at_ns, "remark": push.remark, "attempt": push.attempt}
            more = {"pushed": True, **told}
            state = await ask(live.model_copy(update=more))
        except VirtbusError as error:
            if error.reason not in LATER:
                with contextlib.suppress(VirtbusError):  # the next backup removes leftovers
                    await self.cancel(live, ask)
                self._pushes.pop(work.id, None)
            raise
        if state.state == "done":
            del self._pushes[work.id]
            with contextlib.suppress(VirtbusError):  # the next backup removes old bitmaps
                await self._tools.backups.keep_only(push.uid, {bitmap_name(work.id)})
        return state

    async def cancel(self, work: BackupWork, ask: Ask) -> WorkState:
        """End the work if imaged has not stored the backup; raise imaged's VirtbusError.

        An earlier agent may have begun the work. If libvirt does not answer, QEMU continues to
        write to deleted files until the guest ends or its next backup begins.
        """
        push = self._pushes.get(work.id)
        if push is None or not push.written:
            with contextlib.suppress(VirtbusError):
                await self._tools.backups.abort(work.uid)
            await self._tools.disks.unpin_backup(work.uid, work.id)
        state = await ask(work.model_copy(update={"do": "cancel"}))
        if state.state == "working":
            return state  # imaged is publishing the backup
        self._pushes.pop(work.id, None)
        if state.state == "none":
            with contextlib.suppress(VirtbusError):  # the next backup removes old bitmaps
                await self._tools.backups.keep_only(work.uid, None, bitmap_name(work.id))
        return state

    # --- steps ------------------------------------------------------------------------------
    async def _begin(self, work: BackupWork, guest: ActorState | None, ask: Ask) -> WorkState:
        backups, uid = self._tools.backups, work.uid
        found = await copied_disks(self._tools, guest, work)
        with asked_again():
            usable = await backups.bitmaps(uid, found.targets.values())
        more = {"disks": found.disks, "bitmaps": tuple(sorted(usable))}
        attempt = self._tools.bus.sources.uuid7()
        state = await ask(work.model_copy(update=more | {"attempt": attempt}))
        if state.state != "working" or state.step != PUSH:
            return state
        with asked_again():
            await backups.abort(uid)  # an earlier agent may have begun this backup
            await backups.keep_only(uid, None, bitmap_name(work.id))
        await self._let_write(work, found, state.parent, attempt)
        return state

    async def _let_write(
        self, work: BackupWork, found: CopiedDisks, since: str, attempt: str
    ) -> None:
        uid, pins = work.uid, dict[str, str]()
        for name, target in found.targets.items():
            pins[target] = await self._tools.disks.pin_backup(uid, name, work.id)
        push = self._pushes[work.id] = _Push(uid, attempt)
        push.remark = await brief_freezes.freeze(self._tools.freezes, uid)
        try:
            push.at_ns = self._tools.bus.sources.time_ns()
            with asked_again():
                await self._tools.backups.begin(uid, pins, since, bitmap_name(work.id))
        except VirtbusError as error:
            if error.reason == UNKNOWN:
                del self._pushes[work.id]  # the next call ends a backup that QEMU may have begun
            raise
        finally:
            if not push.remark:
                await brief_freezes.thaw(self._tools.freezes, uid, "the backup has begun")

    async def _written(self, backup: str, push: _Push) -> bool:
        """Return True if QEMU has written all files, so that imaged can read them.

        Raises:
            VirtbusError: 409 `push_failed`: QEMU failed to write the files. 409 `guest_ended`: the
                guest has ended. 503 `guest_unknown`: it is unknown if QEMU has written all files.
        """
        with asked_again():
            found = await self._tools.backups.progress(push.uid)
        if found.state == "none":
            raise guest_ended()
        if found.state == "lost":  # libvirtd or the guest was restarted
            del self._pushes[backup]
            message = "nobody knows if QEMU has written all files; the backup begins again"
            raise VirtbusError(Code.UNAVAILABLE, UNKNOWN, message)
        if found.state == "failed":
            message = f"QEMU did not complete the backup: {found.why}; repeat it"
            raise VirtbusError(Code.CONFLICT, "push_failed", message)
        push.seen = found
        if found.state == "done":
            await self._tools.disks.unpin_backup(push.uid, backup)
            push.written = True
        return push.written

    async def _progress(self, work: BackupWork, push: _Push, ask: Ask) -> WorkState:
        """Let imaged check the free space; return its state with QEMU's progress."""
        state = await ask(work)
        sizes = {"done_bytes": push.seen.done_bytes, "total_bytes": push.seen.total_bytes}
        return state.model_copy(update=sizes)
