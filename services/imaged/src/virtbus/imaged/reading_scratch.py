"""Stages the scratch files of readings (ADR 0079).

During a reading, a client reads a guest's disks as they were at one instant. When the guest
overwrites data, the guest's QEMU first copies the old data to these files.
"""

from virtbus.imaged.edge.backup_staging import BackupStaging
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.schemas.backup import BackupDisk, ScratchWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS

SERVE = STEPS["serve"][1].name


class ReadingScratch:
    """The files of readings: `disks/backups/<id>/<disk>.qcow2`."""

    def __init__(self, staging: BackupStaging, space: DiskSpace, threads: DiskThreads) -> None:
        self._staging = staging
        self._space = space
        self._threads = threads

    async def do(self, want: ScratchWork) -> WorkState:
        """Stage empty files if wanted, or remove the files; check the free space.

        Raises:
            VirtbusError: 503 `disk_full`: the caller must end the reading before a write of the
                guest fails. 503 `store_error`.
        """
        if want.do == "cancel":
            await self._threads.run(self._staging.remove, want.id)
            return WorkState(state="none")
        await self._threads.run(self._space.check_room, 0)
        if want.stage:
            disks = [
                BackupDisk(name=one.name, virtual_size_bytes=one.size_bytes) for one in want.disks
            ]
            await self._threads.run(self._staging.make, want.id, disks)
        return WorkState(state="working", step=SERVE)
