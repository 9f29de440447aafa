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
        """Check the files, and return them by volume name.

        If a guest is `running`, the names that its QEMU knows stay.

        Raises:
            VirtbusError: 409 `disk_refused`.
        """

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        """Return True if any QEMU of this host has the volume's disk open.

        Of a shared volume, only the QEMU of the VM counts: those of its other holders have it, too.
        """

    def layer_pin(self, uid: str, volume: str, snapshot_uid: str) -> str:
        """Return the agent's name of the new file of a disk, while a snapshot is taken."""

    async def pin_layer(self, uid: str, volume: str, disk: SnapshotDisk, snapshot_uid: str) -> None:
        """Check the new file of a disk, and give it that name; raises VirtbusError."""

    async def unpin(self, pin: str) -> None:
        """Remove such a name, so that nobody can open the file any more."""

    async def pin_backup(self, uid: str, disk: str, backup: str) -> str:
        """Check the staged file of a disk; return the agent's name of it.

        Raises:
            VirtbusError: 409 `disk_refused`.
        """

    async def unpin_backup(self, uid: str, backup: str) -> None:
        """Let imaged read the files of a backup, and remove such names, if there are any."""

    async def backup_pins(self) -> set[tuple[str, str]]:
        """Return such names, each as the uid of the VM and the id of the backup."""

    async def protect_layers(self) -> bool:
        """Keep all programs from changing layers; return False if there are none."""

    async def remove_layers(self, names: Sequence[str]) -> None:
        """Remove layers by their file names; raises OSError."""

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        """Remove our names of media that are not among `sources`; no drive has them any more."""
