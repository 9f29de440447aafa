"""Defines the port of a VM's disks as files of this host."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef


class DiskFiles(Protocol):
    """A VM's disks as files of this host."""

    async def sources(
        self, record: VmRecord, made: Mapping[str, MadeDisk], *, running: bool = False
    ) -> Mapping[str, DiskSource]:
        """Check the files of all disks, and return the disks' sources by volume name.

        If a guest is `running`, the names that its QEMU knows stay.

        Raises:
            VirtbusError: 409 `disk_refused`.
        """

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        """Return True if any QEMU of this host has the volume's disk open.

        For a shared volume, only the QEMU of the VM `uid` counts, because the volume's other
        holders have the disk open, too.
        """

    def layer_pin(self, uid: str, volume: str, snapshot_uid: str) -> str:
        """Return the agent's name of the new file of a disk, while a snapshot is taken."""

    async def pin_layer(self, uid: str, volume: str, disk: SnapshotDisk, snapshot_uid: str) -> None:
        """Check the new file of a disk, and name it as `layer_pin` says; raises VirtbusError."""

    async def unpin(self, pin: str) -> None:
        """Remove a name of `layer_pin`, so that QEMU can no longer open the file by it."""

    async def pin_backup(self, uid: str, disk: str, backup: str) -> str:
        """Check imaged's staged file for a disk's backup; return the agent's name of that file.

        Raises:
            VirtbusError: 409 `disk_refused`.
        """

    async def unpin_backup(self, uid: str, backup: str) -> None:
        """Let imaged read the files of a backup, and remove the agent's names of them, if any."""

    async def backup_pins(self) -> set[tuple[str, str]]:
        """Return the uid of the VM and the id of the backup for all names of `pin_backup`."""

    async def protect_layers(self) -> bool:
        """Keep all programs from changing layers; return False if there are none."""

    async def remove_layers(self, names: Sequence[str]) -> None:
        """Remove layers by their file names; raises OSError."""

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        """Remove our names of all media that are not among `sources`. No drive may have them."""
