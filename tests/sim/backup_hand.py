"""imaged's backups, simulated: a directory that survives all deaths, and the rules of `backups.py`.

The content of a disk is a number that grows whenever a guest may have written. An increment has
what was written between two of them, so it fits its parent only if that ends where it begins.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from tests.sim.bus import SimBus

from virtbus.bus.client.ports import Handler, Request
from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.imaged.backup_parents import parent_of
from virtbus.imaged.backups import PUSH, STAGE, STORE
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.edge.backup_files import BackupFiles, damaged
from virtbus.schemas.backup import (
    BackupCheck,
    BackupDisk,
    BackupManifest,
    BackupMode,
    BackupsAsk,
    BackupWork,
    HeldBackup,
    HeldBackups,
    VerifyWork,
    bitmap_name,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.wire import validate

if TYPE_CHECKING:
    from tests.sim.hostports import Threads
    from tests.sim.machine import Host

COPY_S = (0.1, 5.0)
PAGE = 3
"""Few, so that lists of several pages occur."""


@dataclass
class Stored:
    """A complete backup. `since` and `at` are the contents between which an increment was made."""

    manifest: BackupManifest
    since: int
    at: int
    check: BackupCheck | None = None
    rotten: bool = False
    """A byte has changed."""


@dataclass
class StagedFile:
    """A file that QEMU writes; `written` is the content at both ends, once it is complete."""

    written: tuple[int, int] | None = None


@dataclass
class BackupDirectory:
    """`backup_dir` of a node, or of several that share it."""

    complete: dict[str, Stored] = field(default_factory=dict)
    drafts: dict[str, BackupManifest] = field(default_factory=dict)
    begun_s: dict[str, float] = field(default_factory=dict)
    """The time of the last draft of each backup, on the loop's clock."""

    def of_vm(self, uid: str) -> list[BackupManifest]:
        """As `BackupFiles.of_vm`."""
        newest = sorted(self.complete, reverse=True)
        return [made for id_ in newest if (made := self.complete[id_].manifest).uid == uid]

    def chain(self, backup: str) -> list[Stored]:
        """As `BackupFiles.chain`."""
        found: list[Stored] = []
        wanted = backup
        while wanted:
            if wanted not in self.complete:
                if not found:
                    raise VirtbusError(Code.NOT_FOUND, "backup_not_here", f"no backup {backup}")
                raise damaged(backup, f"it rests on the backup {wanted}, which is missing")
            found.append(self.complete[wanted])
            wanted = found[-1].manifest.parent
        return found

    def held(self, backup: str) -> HeldBackup:
        """Return a backup as the directory describes it."""
        one, made = self.complete[backup], self.complete[backup].manifest
        children = tuple(self.children(backup))
        return HeldBackup(id=made.id, manifest=made, check=one.check, children=children)

    def children(self, backup: str) -> list[str]:
        """Return the increments that rest on a backup, also those that are being made."""
        made = {id_: one.manifest for id_, one in self.complete.items()} | self.drafts
        return sorted(id_ for id_, one in made.items() if one.parent == backup)


class BackupHand:
    """The backups of one imaged."""

    def __init__(
        self, bus: SimBus, host: "Host", threads: "Threads", lock: Callable[[str], asyncio.Lock]
    ) -> None:
        """`lock` returns the lock of a VM's disks or of a volume."""
        self._bus = bus
        self._host = host
        self._threads = threads
        self._lock = lock
        self._jobs: DiskJobs
        self._staging = KeyedLock()
        self._stagings: dict[str, WorkState] = {}

    def begin(self, group: asyncio.TaskGroup, ready: Callable[[], None]) -> dict[str, Handler]:
        """Return the handlers; the work runs in `group`. `ready` raises while imaged starts."""
        self._jobs = DiskJobs(group)

        def when_ready(answer: Callable[[Request], Awaitable[object]]) -> Handler:
            async def handle(request: Request) -> object:
                ready()
                return await answer(request)

            return handle

        own = {"backup": self._backup, "backup-verify": self._verify, "backups": self._ask}
        return {verb: when_ready(answer) for verb, answer in own.items()}

    # --- make -------------------------------------------------------------------------------
    async def _backup(self, request: Request) -> WorkState:
        want = validate(BackupWork, request.data)
        done = partial(self._done, want.id)
        if want.do == "cancel":
            late = await self._jobs.end(want.id) or await done()
            if late is None:
                await self._threads.on_disk(partial(self._drop, want.id))
            return late or WorkState(state="none")
        if not want.live or want.pushed:
            work = partial(self._store if want.live else self._copy, want)
            return await self._jobs.ensure(want.id, want.uid, done, work)
        return await done() or await self._push(want)

    async def _push(self, want: BackupWork) -> WorkState:
        """Stage new files for QEMU, or look after those that it writes."""
        if want.bitmaps is not None:
            async with self._staging.of(want.id):
                if want.attempt in self._stagings:
                    return self._stagings[want.attempt]
                if late := await self._jobs.end(want.id) or await self._done(want.id):
                    return late
                parent = await self._threads.on_disk(partial(self._stage, want), full="disk_full")
                state = WorkState(state="working", step=PUSH, parent=parent)
                self._stagings[want.attempt] = state
                return state
        if want.id not in self._host.backups.drafts:
            raise VirtbusError(Code.CONFLICT, "backup_lost", "the files of the backup are gone")
        if self._host.full:
            raise VirtbusError(Code.UNAVAILABLE, "disk_full", "no space left; free some there")
        return WorkState(state="working", step=PUSH)

    async def _done(self, backup: str) -> WorkState | None:
        found = backup in self._host.backups.complete
        return WorkState(state="done", done_bytes=1, total_bytes=1) if found else None

    def _drop(self, backup: str) -> None:
        self._host.backups.drafts.pop(backup, None)
        self._host.staged.pop(backup, None)

    def _stage(self, want: BackupWork) -> str:
        """Make the draft and new files for QEMU; return the bitmap of the parent."""
        self._drop(want.id)
        draft = self._draft(want, frozenset(want.bitmaps or ()))
        self._host.staged[want.id] = StagedFile()
        return bitmap_name(draft.parent) if draft.parent else ""

    def _draft(self, want: BackupWork, bitmaps: frozenset[str]) -> BackupManifest:
        directory = self._host.backups
        disks = tuple(
            BackupDisk(
                name=one.name,
                volume_uid=one.ref.uid if one.ref is not None else "",
                virtual_size_bytes=1,
            )
            for one in want.disks
        )
        found = parent_of(cast("BackupFiles", directory), want, disks, bitmaps)
        parent, why = found
        if parent is None and want.mode is BackupMode.INCREMENTAL:
            raise VirtbusError(Code.CONFLICT, "no_parent", f"no increment is possible: {why}")
        names = {"id", "uid", "namespace", "name", "node", "owner", "schedule", "attempt"}
        more = {} if parent is None else {"parent": parent.id, "depth": parent.depth + 1}
        more["number"] = 1 + max(
            (one.manifest.number for one in directory.complete.values()), default=0
        )
        now_ns = self._bus.sources.time_ns()
        fields = {"created_ns": now_ns, "full_because": why, "disks": disks, **more}
        draft = BackupManifest.model_validate(want.model_dump(include=names) | fields)
        directory.drafts[want.id] = draft
        directory.begun_s[want.id] = self._host.loop.time()
        return draft

    async def _copy(self, want: BackupWork, job: Job) -> None:
        """Copy the disks of a VM that is off; its start waits meanwhile."""
        job.step = STAGE
        refs = sorted(one.ref.folder for one in want.disks if one.ref is not None)
        async with self._jobs.slots, AsyncExitStack() as held:
            for key in (want.uid, *refs):
                await held.enter_async_context(self._lock(key))
            if not want.may_begin:
                raise VirtbusError(Code.CONFLICT, "disk_in_use", "a guest may use the disks")
            if want.uid not in self._host.disk.overlays:
                raise VirtbusError(Code.NOT_FOUND, "disk_missing", "a disk has no data")
            try:
                known = self._host.disk.bitmaps.get(want.uid, {})
                draft = await self._threads.on_disk(
                    lambda: self._draft(want, frozenset(known)), full="disk_full"
                )
                await asyncio.sleep(self._host.rng.uniform(*COPY_S))
                self._host.watcher.backup_copied(self._host, want.uid)
                since = known[bitmap_name(draft.parent)] if draft.parent else 0
                at = self._host.disk.content.get(want.uid, 0)
                await self._publish(Stored(draft, since, at), job)
            finally:
                self._drop(want.id)

    async def _store(self, want: BackupWork, job: Job) -> None:
        """Store the files that QEMU has written."""
        job.step = STORE
        async with self._jobs.slots:
            try:
                draft = self._host.backups.drafts.get(want.id)
                if draft is None or draft.attempt != want.attempt:
                    raise VirtbusError(Code.CONFLICT, "backup_lost", "the files are gone")
                await asyncio.sleep(self._host.rng.uniform(*COPY_S))
                staged = self._host.staged.get(want.id)
                written = staged.written if staged is not None else None
                if self._host.backups.drafts.get(want.id) != draft:
                    raise VirtbusError(Code.CONFLICT, "backup_lost", "staged again meanwhile")
                if written is None:
                    self._host.watcher.wrong("I2", f"{want.id} is stored before it is written")
                    written = 0, 0
                more = {"created_ns": want.at_ns, "bitmap": bitmap_name(want.id)}
                await self._publish(Stored(draft.model_copy(update=more), *written), job)
            finally:
                self._drop(want.id)

    async def _publish(self, made: Stored, job: Job) -> None:
        directory, id_ = self._host.backups, made.manifest.id

        def publish() -> None:
            if made.manifest.parent:
                directory.chain(made.manifest.parent)
            if id_ not in directory.complete:
                directory.complete[id_] = made
                self._host.watcher.backup_stored(self._host, made)

        job.final = True
        try:
            await self._threads.on_disk(publish, full="disk_full")
        finally:
            job.final = id_ in directory.complete

    # --- verify -----------------------------------------------------------------------------
    async def _verify(self, request: Request) -> WorkState:
        want = validate(VerifyWork, request.data)
        checked = partial(self._checked, want)
        if want.do == "cancel":
            return await self._jobs.end(want.id) or await checked() or WorkState(state="none")
        return await self._jobs.ensure(want.id, "", checked, partial(self._read, want))

    async def _checked(self, want: VerifyWork) -> WorkState | None:
        found = self._host.backups.complete.get(want.backup)
        check = found.check if found is not None else None
        passed = check is not None and check.operation == want.id and not check.problem
        return WorkState(state="done") if passed else None

    async def _read(self, want: VerifyWork, job: Job) -> None:
        directory, problem = self._host.backups, ""
        async with self._jobs.slots:
            await asyncio.sleep(self._host.rng.uniform(*COPY_S))
            try:
                if any(one.rotten for one in directory.chain(want.backup)):
                    problem = "the file of a disk has changed"
            except VirtbusError as error:
                if error.code != Code.CONFLICT:
                    raise
                problem = str(error)
            job.step = "note"
            now_ns = self._bus.sources.time_ns()
            check = BackupCheck(operation=want.id, at_ns=now_ns, problem=problem)
            await self._threads.on_disk(partial(self._note, want.backup, check), full="disk_full")
        if problem:
            raise damaged(want.backup, problem)

    def _note(self, backup: str, check: BackupCheck) -> None:
        if backup not in self._host.backups.complete:
            raise VirtbusError(Code.NOT_FOUND, "backup_not_here", backup)
        self._host.backups.complete[backup].check = check
        self._host.watcher.backup_checked(self._host, backup, check)

    # --- list and delete ----------------------------------------------------------------------
    async def _ask(self, request: Request) -> HeldBackups:
        want, directory = validate(BackupsAsk, request.data), self._host.backups
        if want.do == "list":
            later = sorted(id_ for id_ in directory.complete if id_ > want.after)
            items = tuple(map(directory.held, later[:PAGE]))
            return HeldBackups(items=items, more=len(later) > PAGE)
        if want.id is None or want.id not in directory.complete:
            return HeldBackups()
        found = directory.held(want.id)
        if want.do == "delete":
            await self._threads.on_disk(partial(self._remove, want.id))
        return HeldBackups(items=(found,))

    def _remove(self, backup: str) -> None:
        directory = self._host.backups
        if needed := directory.children(backup):
            message = f"the backups {', '.join(needed)} rest on {backup}"
            raise VirtbusError(Code.CONFLICT, "backup_needed", message)
        if backup in directory.complete:
            self._host.watcher.backup_removed(self._host, directory.complete[backup])
            del directory.complete[backup]

    def readable(self, backup: str) -> bool:
        """Return True if a volume can be filled with the backup."""
        try:
            return not any(one.rotten for one in self._host.backups.chain(backup))
        except VirtbusError:
            return False
