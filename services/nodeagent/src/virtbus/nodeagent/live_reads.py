"""Lets readers have the disks of running guests at one instant, as NBD exports (ADR 0901).

libvirt and QEMU know what is served, and the operation's step says that it was. So an agent that
restarts continues. Nothing of a reading is left after its end: no server, file or name.
"""

import logging
from collections.abc import Awaitable, Callable

from virtbus.nodeagent import brief_freezes
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.copied_guests import LATER, asked_again, copied_disks, guest_ended
from virtbus.nodeagent.core.guest_backups import Reading
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.backup import READ_BITMAP, BackupWork, read_bitmap
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS, OperationRecord, OperationStatus

log = logging.getLogger(__name__)

SERVE = STEPS["serve"][1].name
Ask = Callable[[BackupWork], Awaitable[WorkState]]


class LiveReads:
    """The readings of a node, one at a time for each VM."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools
        self._remarks: dict[str, str] = {}
        """The reasons why guests were not frozen, by the id of the reading."""

    async def ensure(
        self,
        op: OperationRecord,
        status: OperationStatus,
        work: BackupWork,
        guest: ActorState | None,
        ask: Ask,
    ) -> WorkState:
        """Do the next step, up to a server that runs; return the state.

        Raises:
            VirtbusError: nothing is left. 409 `guest_ended`, `read_timeout`, `no_parent`,
                `disk_not_switchable`, `layers_differ`; those of imaged and libvirt. 503
                `guest_unknown`: it has to be repeated.
        """
        try:
            with asked_again():
                served = await self._tools.reads.served(op.uid, op.id)
            if status.step == SERVE or served:
                return await self._served(op, status, work, ask, served=served)
            await self._begin(op, work, guest, ask)
        except VirtbusError as error:
            if error.reason not in LATER:
                await self.cancel(op, work, ask)
            raise
        return WorkState(state="working", step=SERVE)

    async def cancel(self, op: OperationRecord, work: BackupWork, ask: Ask) -> WorkState:
        """End the reading, and forget its instant; raises as `ensure`."""
        state = await self._end(op, work, ask)
        with asked_again():
            await self._tools.backups.keep_only(op.uid, None, read_bitmap(op.id))
        return state

    # --- steps ------------------------------------------------------------------------------
    async def _served(
        self,
        op: OperationRecord,
        status: OperationStatus,
        work: BackupWork,
        ask: Ask,
        *,
        served: bool,
    ) -> WorkState:
        if op.finish:
            return await self._finish(op, work, ask)
        if not served:
            raise guest_ended()
        now_ns = self._tools.bus.sources.time_ns()
        if now_ns > status.begun_ns + op.within_s * 10**9:
            message = (
                f"the reader did not finish within {op.within_s} s; read again with more time, or "
                "make a backup in a directory"
            )
            raise VirtbusError(Code.CONFLICT, "read_timeout", message)
        return await ask(work)  # it checks the free space

    async def _begin(
        self, op: OperationRecord, work: BackupWork, guest: ActorState | None, ask: Ask
    ) -> None:
        backups, uid, since = self._tools.backups, op.uid, ""
        found = await copied_disks(self._tools, guest, work)
        if op.since:
            since = read_bitmap(op.since)
            with asked_again():
                usable = await backups.bitmaps(uid, found.targets.values(), READ_BITMAP)
            if since not in usable:
                raise _no_parent(op.since)
        await ask(work.model_copy(update={"disks": found.disks, "bitmaps": ()}))
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
        try:
            with asked_again():
                reading = Reading(op.id, pins, exports, since, read_bitmap(op.id))
                await self._tools.reads.begin(uid, reading)
        finally:
            if not remark:
                await brief_freezes.thaw(self._tools.freezes, uid, "the reading has begun")
        self._remarks[op.id] = remark

    async def _finish(self, op: OperationRecord, work: BackupWork, ask: Ask) -> WorkState:
        """End the server; the bitmap of this instant replaces that of the reading before."""
        await self._end(op, work, ask)
        with asked_again():
            kept = {read_bitmap(op.id)}
            await self._tools.backups.keep_only(op.uid, kept, prefix=READ_BITMAP)
        log.info("reading %s finished", op.id, extra={"code": "reading_finished", "uid": op.uid})
        return WorkState(state="done", message=self._remarks.pop(op.id, ""))

    async def _end(self, op: OperationRecord, work: BackupWork, ask: Ask) -> WorkState:
        """End the server, and remove the files. While libvirt is away, the server runs on."""
        with asked_again():
            await self._tools.reads.end(op.uid)
        await self._tools.disks.unpin_backup(op.uid, op.id)
        return await ask(work.model_copy(update={"do": "cancel"}))


def _no_parent(since: str) -> VirtbusError:
    message = (
        f"the disks do not have the bitmap of the reading {since}: a later one was finished, the "
        "guest ended without a stop, a snapshot or another disk came; read everything, without "
        "--since"
    )
    return VirtbusError(Code.CONFLICT, "no_parent", message)
