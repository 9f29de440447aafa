"""Verifies backups, and reads their disks before a restore uses them (ADR 0068)."""

import asyncio
import logging
from functools import partial

from virtbus.imaged.backups import BackupParts
from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.imaged.edge.backup_files import damaged, opened_disk
from virtbus.imaged.edge.backup_staging import check_file
from virtbus.imaged.edge.digests import Digester
from virtbus.imaged.edge.export_conversion import ExportSource, OpenedSource
from virtbus.schemas.backup import MAX_TEXT, BackupCheck, BackupDisk, VerifyWork
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS

log = logging.getLogger(__name__)

READ, NOTE = (step.name for step in STEPS["verify"])


class BackupChecks:
    """The verifications of a node."""

    def __init__(self, jobs: DiskJobs, parts: BackupParts) -> None:
        self._jobs = jobs
        self._parts = parts

    async def verify(self, want: VerifyWork) -> WorkState:
        """Ensure or cancel the verification of a backup.

        Raises:
            VirtbusError: 404 `backup_not_here`; 409 `backup_damaged`; 422 `backup_unreadable`,
                `backups_off`; 503 `store_error`.
        """
        _ = self._parts.directory
        if want.do == "cancel":
            late = await self._jobs.end(want.id) or await self._checked(want)
            return late or WorkState(state="none")
        work = partial(self._verify, want)
        return await self._jobs.ensure(want.id, "", partial(self._checked, want), work)

    async def read_all(self, source: ExportSource, backup: str, disk: str, job: Job) -> None:
        """Read an opened disk in a backup and in the backups that it rests on; check the digests.

        Raises:
            VirtbusError: 409 `backup_damaged`. The errors of `BackupFiles.chain`.
        """
        chain = await self._parts.threads.run(self._parts.directory.chain, backup)
        disks = [one for each in chain for one in each.disks if one.name == disk]
        job.total_bytes = sum(one.size_bytes for one in disks)
        for descriptor, of in zip((source.disk, *source.layers), disks, strict=True):
            if why := await self._read(descriptor, of, job):
                raise damaged(backup, why)

    @property
    def slots(self) -> asyncio.Semaphore:
        """Return the slots for work that may hang in the backup directory."""
        return self._jobs.slots

    async def opened(self, backup: str, disk: str) -> OpenedSource:
        return await self._parts.threads.run(opened_disk, self._parts.directory, backup, disk)

    # --- the job ------------------------------------------------------------------------------
    async def _checked(self, want: VerifyWork) -> WorkState | None:
        found = await self._parts.threads.run(self._parts.directory.check_of, want.backup)
        if found is None or found.operation != want.id or found.problem:
            return None
        return WorkState(state="done")

    async def _verify(self, want: VerifyWork, job: Job) -> None:
        threads, files, problem = self._parts.threads, self._parts.directory, ""
        job.step = READ
        async with self._jobs.slots:
            try:
                chain = await threads.run(files.chain, want.backup)
                job.total_bytes = sum(one.size_bytes for one in chain)
                for disk in chain[0].disks:
                    with await threads.run(opened_disk, files, want.backup, disk.name) as source:
                        parts = [
                            one for each in chain for one in each.disks if one.name == disk.name
                        ]
                        opened = zip((source.disk, *source.layers), parts, strict=True)
                        for descriptor, of in opened:
                            problem = problem or await self._read(descriptor, of, job)
            except VirtbusError as error:
                if error.code not in {Code.CONFLICT, Code.UNSUPPORTED}:
                    raise
                problem = str(error)
            job.step = NOTE
            now_ns = self._parts.sources.time_ns()
            check = BackupCheck(operation=want.id, at_ns=now_ns, problem=problem[:MAX_TEXT])
            await threads.run(files.note_check, want.backup, check)
        if problem:
            raise damaged(want.backup, problem)
        log.info("backup %s verified", want.backup, extra={"code": "backup_verified"})

    async def _read(self, descriptor: int, of: BackupDisk, job: Job) -> str:
        threads = self._parts.threads
        try:
            await threads.run(check_file, descriptor, of)
        except VirtbusError:
            return f"the file of the disk {of.name} has another header"
        read = Digester(descriptor)
        while done := await threads.run(read.step):
            job.done_bytes += done
            if read.done_bytes > of.size_bytes:
                return f"the file of the disk {of.name} is longer than it was"
        if read.done_bytes < of.size_bytes:
            return f"the file of the disk {of.name} is shorter than it was"
        return "" if read.digest == of.digest else f"the file of the disk {of.name} has changed"
