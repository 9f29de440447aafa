"""Lets running guests serve their disks over NBD, with the content of one instant (ADR 0079).

Each reading is an operation on one VM. libvirt and QEMU report if a guest serves its disks now. The
operation's step shows if the guest ever served its disks. So an agent can continue after a restart.
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

from virtbus.nodeagent import brief_freezes
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.copied_guests import LATER, asked_again, copied_disks, guest_ended
from virtbus.nodeagent.core.guest_backups import Reading
from virtbus.nodeagent.live_snapshots import UNKNOWN
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.backup import (
    READ_BITMAP,
    BackedDisk,
    BackupWork,
    ScratchWork,
    read_bitmap,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS, OperationRecord, OperationStatus

log = logging.getLogger(__name__)

SERVE = STEPS["serve"][1].name
Ask = Callable[[ScratchWork], Awaitable[WorkState]]


class Read(NamedTuple):
    """A reading, and the agent's knowledge of its guest."""

    op: OperationRecord
    status: OperationStatus
    work: BackupWork
    """The work of a backup, which names the disks of the VM."""
    guest: ActorState | None
    """The running VM; None if the VM is off, or if its state is unknown."""
    off: bool
    """True if no guest of the VM runs."""


class LiveReads:
    """The readings of a node, one at a time for each VM."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools
        self._remarks: dict[str, str] = {}
        """The reasons why guests were not frozen, by the id of the reading."""
        self._failed: dict[str, VirtbusError] = {}
        """The errors of failed readings that must still be ended, by the reading's id."""

    async def ensure(self, read: Read, ask: Ask) -> WorkState:
        """Do the next step; return the state.

        Raises:
            VirtbusError: 503 `guest_unknown`, `recovering`: the caller repeats the call. After all
                other errors, the reading is ended, without a server, file or pin.
            VirtbusError: 409 `guest_ended`: the guest no longer serves its disks. 409
                `read_timeout`: the reader did not finish in time.
            VirtbusError: 409 `no_parent`: the disks lack the bitmap of the reading `since`. 409
                `layers_differ`: libvirt names files that the guest does not use.
            VirtbusError: 409 `disk_not_switchable`: the guest lacks a disk, or libvirt does not
                know the disk. Also the errors of imaged and libvirt.
        """
        op = read.op
        try:
            if op.id in self._failed:
                raise self._failed[op.id]
            with asked_again():
                served = await self._tools.reads.served(op.uid, op.id)
            if read.status.step == SERVE or served:
                return await self._served(read, ask, served=served)
            await self._begin(read, ask)
        except VirtbusError as error:
            if error.reason not in LATER:
                self._failed[op.id] = error
                await self.cancel(read, ask)
            raise
        return WorkState(state="working", step=SERVE)

    async def cancel(self, read: Read, ask: Ask) -> WorkState:
        """End the reading, and remove its bitmap. Repeat the call after a VirtbusError 503."""
        state = await self._end(read, ask)
        with asked_again():
            await self._tools.backups.keep_only(read.op.uid, None, read_bitmap(read.op.id))
        self._failed.pop(read.op.id, None)
        self._remarks.pop(read.op.id, None)
        return state

    async def end_unknown(self, known: Collection[str], busy: Collection[str]) -> bool:
        """End the readings whose ids are not in `known`; return True if all of them have ended.

        `busy` has the uids of VMs that run or may run.
        """
        done = True
        for uid, id_ in await self._tools.disks.backup_pins():
            if id_ in known:
                continue
            try:
                with asked_again():
                    ended = await self._tools.reads.end(uid, id_, off=uid not in busy)
            except VirtbusError as error:
                extra = {"code": error.reason, "uid": uid}
                log.warning("a reading without an operation is ended later: %s", error, extra=extra)
                ended = False
            if ended:
                await self._tools.disks.unpin_backup(uid, id_)
            else:
                done = False
        return done

    # --- steps ------------------------------------------------------------------------------
    async def _served(self, read: Read, ask: Ask, *, served: bool) -> WorkState:
        op = read.op
        if op.finish:
            return await self._finish(read, ask)
        now_ns = self._tools.bus.sources.time_ns()
        if now_ns > read.status.begun_ns + op.within_s * 10**9:
            message = (
                f"the reader did not finish within {op.within_s} s; read again with more time, or "
                "make a backup in a directory"
            )
            raise VirtbusError(Code.CONFLICT, "read_timeout", message)
        if not served:
            raise guest_ended()
        return await ask(_scratch(op))  # makes imaged check the free space

    async def _begin(self, read: Read, ask: Ask) -> None:
        op, backups, uid, since = read.op, self._tools.backups, read.op.uid, ""
        found, about = await copied_disks(self._tools, read.guest, read.work), _about(read.work)
        if op.since:
            since = read_bitmap(op.since)
            with asked_again():
                targets = found.targets.values()
                usable = await backups.bitmaps(uid, targets, READ_BITMAP, about)
            if since not in usable:
                raise _no_parent(op.since)
        await ask(_scratch(op, stage=True, disks=found.disks))
        with asked_again():
            await self._tools.reads.end(uid)
            await backups.abort(uid)
            await backups.keep_only(uid, None, read_bitmap(op.id))
        exports = {target: name for name, target in found.targets.items()}
        pins = {
            target: await self._tools.disks.pin_backup(uid, name, op.id)
            for target, name in exports.items()
        }
        remark = await brief_freezes.freeze(self._tools.freezes, uid)
        self._remarks[op.id] = remark
        try:
            with asked_again():
                reading = Reading(op.id, pins, exports, since, read_bitmap(op.id), about)
                await self._tools.reads.begin(uid, reading)
        finally:
            if not remark:
                await brief_freezes.thaw(self._tools.freezes, uid, "the reading has begun")

    async def _finish(self, read: Read, ask: Ask) -> WorkState:
        """End the server, and remove the bitmaps of all other readings of this VM."""
        op = read.op
        await self._end(read, ask)
        with asked_again():
            kept = {read_bitmap(op.id)}
            await self._tools.backups.keep_only(op.uid, kept, prefix=READ_BITMAP)
        log.info("reading %s finished", op.id, extra={"code": "reading_finished", "uid": op.uid})
        return WorkState(state="done", message=self._remarks.pop(op.id, ""))

    async def _end(self, read: Read, ask: Ask) -> WorkState:
        """End the server, and remove the files.

        Raises:
            VirtbusError: 503 `guest_unknown`: libvirt is away, or has lost the guest. QEMU may then
                still serve the disks.
        """
        op = read.op
        with asked_again():
            ended = await self._tools.reads.end(op.uid, op.id, off=read.off)
        if not ended:
            message = "libvirt does not know the guest, which may serve its disks; the agent waits"
            raise VirtbusError(Code.UNAVAILABLE, UNKNOWN, message)
        await self._tools.disks.unpin_backup(op.uid, op.id)
        return await ask(_scratch(op, do="cancel"))


def _scratch(op: OperationRecord, **more: object) -> ScratchWork:
    return ScratchWork.model_validate({"id": op.id, **more})


def _about(work: BackupWork) -> str:
    """Return the names of the disks, each with the uid of its volume.

    A bitmap is in the volume's file, so it is useless after a disk has got another volume.
    """
    return " ".join(sorted(map(_volume, work.disks)))


def _volume(disk: BackedDisk) -> str:
    return f"{disk.name}={disk.ref.uid if disk.ref is not None else ''}"


def _no_parent(since: str) -> VirtbusError:
    message = (
        f"the disks do not have the bitmap of the reading {since}: a later one was finished, the "
        "guest ended without a stop, a snapshot or another volume came; read everything, without "
        "--since"
    )
    return VirtbusError(Code.CONFLICT, "no_parent", message)
