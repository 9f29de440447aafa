"""Makes snapshots whose disks become layers: nothing is copied, and a guest may run (ADR 0061).

Each disk continues in a new file that rests on its former file. The new file is complete before any
change, so both files together have the disk's content at each instant. For a running guest, the new
file replaces the former file if QEMU uses the new file. If QEMU does not use the new file, imaged
removes the new file.
"""

import asyncio
import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial

from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.edge.disk_copy import lock_disk, open_disk
from virtbus.imaged.edge.layered_disks import freeze_layers, stage_on_layer, used_new
from virtbus.imaged.edge.snapshot_files import SnapshotFolders, SnapshotNote
from virtbus.imaged.snapshot_parts import SnapshotParts, finished, snapshot_lock, translated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.layer import MAX_LAYERS
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS
from virtbus.schemas.pool import LOCAL
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.snapshot_rpc import SnapshotWork

log = logging.getLogger(__name__)

_, LAYER, PUBLISH = (step.name for step in STEPS["snapshot"])
LOOK_S = 1.0
"""Interval of checks whether a QEMU has files open, until the agent says which files QEMU uses."""
SOON_S = 2.0
"""Time that a request waits for a step. Staging and the last renames are usually faster."""


@dataclass
class _Pending:
    """The state of a snapshot's work until it is known which files QEMU uses."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the new files are staged, and at the end of the work."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    switched: bool = False

    def decide(self, switched: bool) -> None:
        """Record if QEMU has switched to the new files. Only the first call counts."""
        if not self.decided.is_set():
            self.switched = switched
            self.changed.clear()
            self.decided.set()


class Layering:
    """The layered snapshots.

    While a snapshot is made, no other work of imaged uses the snapshot's disks.
    """

    def __init__(self, jobs: DiskJobs, parts: SnapshotParts) -> None:
        self._jobs = jobs
        self._parts = parts
        self._pending: dict[str, _Pending] = {}

    async def resume(self, held: AsyncExitStack, note: SnapshotNote) -> None:
        """Continue a snapshot that a crash interrupted; `held` has the locks of its disks."""
        pending = self._pending[note.ref.uid] = _Pending()
        work = partial(self._resumed, held, note, pending)
        self._jobs.begin(note.ref.uid, note.uid, work)

    async def _resumed(
        self, held: AsyncExitStack, note: SnapshotNote, pending: _Pending, job: Job
    ) -> None:
        try:
            async with held:
                await self._finish(note, job)
        finally:
            pending.changed.set()
        extra = {"code": "snapshot_completed", "uid": note.uid}
        log.warning("completed the interrupted snapshot of %s", note.name, extra=extra)

    # --- requests ---------------------------------------------------------------------------
    async def do(self, want: SnapshotWork) -> WorkState:
        """Ensure or cancel a layered snapshot. The answer waits at most SOON_S for a step to end.

        Raises:
            VirtbusError: the errors of `Snapshots.do`. 409 `chain_too_long`. 409 `guest_ended`: the
                guest ended before its QEMU used the new files. 422 `no_snapshots`.
        """
        pending = self._pending.setdefault(want.id, _Pending())
        if want.switched is not None:
            pending.decide(want.switched)
        if want.do == "cancel":
            return await self._cancel(want, pending)
        done, work = partial(finished, self._parts, want.snapshot), partial(self._run, want)
        state = await self._jobs.ensure(want.id, want.uid, done, work)
        if state.state == "working":
            await wait_for_event(pending.changed, SOON_S)
            state = await self._jobs.ensure(want.id, want.uid, done, work)
        if state.state == "done":
            self._pending.pop(want.id, None)
        return state

    async def _cancel(self, want: SnapshotWork, pending: _Pending) -> WorkState:
        if want.switched is not None and want.id in self._jobs.ids:
            await wait_for_event(pending.changed, SOON_S)
        late = await self._jobs.end(want.id) or await finished(self._parts, want.snapshot)
        if late is not None:
            return late
        self._pending.pop(want.id, None)
        await self._parts.threads.run(translated, discard, self._parts.files, want)
        return WorkState(state="none")

    # --- the job ----------------------------------------------------------------------------
    async def _run(self, want: SnapshotWork, job: Job) -> None:
        refs = [disk.ref for disk in want.disks if disk.ref is not None]
        pending = self._pending.setdefault(want.id, _Pending())
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._parts.locks.held(want.uid, *refs))
                await stack.enter_async_context(self._parts.locks.of(snapshot_lock(want.snapshot)))
                await self._make(want, job)
        finally:
            pending.changed.set()
        extra = {"code": "snapshot_done", "uid": want.uid}
        log.info("%s of %s is complete", want.snapshot.name, want.name, extra=extra)

    async def _make(self, want: SnapshotWork, job: Job) -> None:
        threads, files = self._parts.threads, self._parts.files
        if not want.live and not want.may_begin:
            message = f"{want.name} was started before its disks were frozen; repeat the snapshot"
            raise VirtbusError(Code.CONFLICT, "disk_in_use", message)
        note = SnapshotNote(
            ref=want.snapshot,
            resource=want.resource,
            uid=want.uid,
            name=want.name,
            disks=want.disks,
            layered=True,
            live=want.live,
        )
        await threads.run(self._parts.space.check_room, 0)
        with ExitStack() as opened:
            try:
                await threads.run(translated, self._stage, note, opened)
                job.step = LAYER
                await threads.run(translated, files.note_begun, note)
                job.final = True
            finally:
                if not job.final:
                    await threads.run(translated, discard, files, want)
            await self._finish(note, job)

    async def _finish(self, note: SnapshotNote, job: Job) -> None:
        """Complete the snapshot, or undo it, after its journal was written.

        Raises:
            VirtbusError: 409 `guest_ended`: QEMU did not use the new files, and they are removed.
        """
        job.step, job.final = LAYER, True
        pending = self._pending.setdefault(note.ref.uid, _Pending())
        if note.live and not pending.decided.is_set():
            pending.changed.set()  # after a decision, only the end of the work sets this event
        if note.live and not await self._switched(note, pending):
            await self._parts.threads.run(translated, discard, self._parts.files, note)
            raise _ended()
        job.step = PUBLISH
        await self._parts.forward(partial(freeze_layers, self._parts.files), note)

    async def _switched(self, note: SnapshotNote, pending: _Pending) -> bool:
        """Return True if the guest's QEMU has used the new files.

        The agent reports this. Without a report, the files are checked once no QEMU has them open.
        If nothing was written to the new files, the former files have all content.
        """
        while not await wait_for_event(pending.decided, LOOK_S):
            found: bool | None = await self._parts.threads.run(
                translated, used_new, self._parts.files, note
            )
            if found is not None:
                return found
        return pending.switched

    # --- in a disk thread -------------------------------------------------------------------
    def _stage(self, note: SnapshotNote, opened: ExitStack) -> None:
        """Write the new files. The disks of a VM that is off are locked until `opened` ends."""
        files = self._parts.files
        files.begin(note.ref.folder)
        for disk in note.disks:
            if disk.ref is not None and disk.ref.pool != LOCAL:
                message = (
                    f"the volume {disk.ref.name} is in the pool {disk.ref.pool}, which has no "
                    "layers; stop its VM, and repeat the snapshot"
                )
                raise VirtbusError(Code.UNSUPPORTED, "no_snapshots", message)
            place = self._parts.places.of(note.uid, disk.name, disk.ref)
            size_bytes = disk.size_bytes if note.live else place.overlay.virtual_size_bytes
            if size_bytes <= 0:  # the agent has found no QEMU with the disk
                raise _ended()
            if not note.live:
                lock_disk(open_disk(opened, place.path))
            refuse_long(disk, len(place.layers))
            layer = files.layers.path(note.ref.uid, disk.name)
            stage_on_layer(files, note.uid, disk, layer, size_bytes)


def _ended() -> VirtbusError:
    message = "the guest ended before its disks were frozen; repeat the snapshot"
    return VirtbusError(Code.CONFLICT, "guest_ended", message)


def refuse_long(disk: SnapshotDisk, layers: int) -> None:
    """Raise 409 `chain_too_long` if the disk would rest on more layers than allowed."""
    if layers >= MAX_LAYERS:
        message = (
            f"the disk {disk.name} rests on {layers} layers, and no more are allowed; stop the VM, "
            "and take a snapshot, which copies the disks of a VM that is off"
        )
        raise VirtbusError(Code.CONFLICT, "chain_too_long", message)


def discard(files: SnapshotFolders, of: SnapshotWork | SnapshotNote) -> None:
    """Remove the files of a snapshot that is not completed, the journal first."""
    ref = of.snapshot if isinstance(of, SnapshotWork) else of.ref
    files.remove(ref.folder)
    files.unstage(of.uid, of.disks)
