"""Defines the port that checks, names and removes the files of VMs' disks on this host.

The agent makes a hard link to each checked file, and libvirt gets the path of the link.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef


class DiskFiles(Protocol):
    """The files of VMs' disks on this host."""

    async def sources(
        self, record: VmRecord, made: Mapping[str, MadeDisk], *, running: bool = False
    ) -> Mapping[str, DiskSource]:
        """Check the files of all disks, and return the disks' sources by volume name.

        If a guest is `running`, the agent's links to files that the guest's QEMU uses stay.

        Raises:
            VirtbusError: 409 `disk_refused`: a file or device is not as the record says, or may not
                be used. 409 `pool_unknown`: a pool of this node has no place for a volume.
        """

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        """Return True if any QEMU of this host has the volume's disk open.

        For a shared volume, only the QEMU of the VM `uid` counts, because the volume's other
        holders have the disk open, too.
        """

    def layer_pin(self, uid: str, volume: str, snapshot_uid: str) -> str:
        """Return the agent's path of the new file of a disk, while a snapshot is taken."""

    async def pin_layer(self, uid: str, volume: str, disk: SnapshotDisk, snapshot_uid: str) -> None:
        """Check the new file of a disk, and link it to `layer_pin`'s path; raises VirtbusError."""

    async def unpin(self, pin: str) -> None:
        """Remove a path of `layer_pin`, so that QEMU can no longer open the file by this path."""

    async def pin_backup(self, uid: str, disk: str, backup: str) -> str:
        """Check imaged's staged file for a disk's backup; return the agent's path of that file.

        Raises:
            VirtbusError: 409 `disk_refused`: it cannot be opened, is no qcow2 file, or has a
                backing file.
        """

    async def unpin_backup(self, uid: str, backup: str) -> None:
        """Let imaged read the files of a backup, and remove the agent's paths of these files."""

    async def backup_pins(self) -> set[tuple[str, str]]:
        """Return the uid of the VM and the id of the backup for all paths of `pin_backup`."""

    async def protect_layers(self) -> bool:
        """Keep all programs from changing layers; return False if there are no layers."""

    async def remove_layers(self, names: Sequence[str]) -> None:
        """Remove layers by their file names; raises OSError."""

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        """Remove the agent's links to media that are not in `sources`. No drive may have these."""
