"""Defines the port that checks, links and removes the files of VMs' disks on this host.

libvirt gets the path of the agent's own hard link to each checked file.
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
        """Check all disks, and return their sources by volume name.

        If a guest is `running`, keep the agent's links to files that QEMU uses.

        Raises:
            VirtbusError: 409 `disk_refused`: a file or device differs from the record, or is
                forbidden.
                409 `pool_unknown`: a pool of this node has no data of a volume.
        """

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        """Return True if any QEMU of this host has the volume's disk open.

        For a shared volume, only the QEMU of the VM `uid` counts, because other holders may also
        have the disk open.
        """

    def layer_pin(self, uid: str, volume: str, snapshot_uid: str) -> str:
        """Return the agent's path of a disk's new file during a snapshot."""

    async def pin_layer(self, uid: str, volume: str, disk: SnapshotDisk, snapshot_uid: str) -> None:
        """Check a disk's new file, and link it at `layer_pin`'s path. Raises VirtbusError."""

    async def unpin(self, pin: str) -> None:
        """Remove a path of `layer_pin`."""

    async def pin_backup(self, uid: str, disk: str, backup: str) -> str:
        """Check imaged's staged file for a disk's backup, and return the agent's path of that file.

        Raises:
            VirtbusError: 409 `disk_refused`: the file is unreadable, no qcow2, or has a backing
                file.
        """

    async def unpin_backup(self, uid: str, backup: str) -> None:
        """Let imaged read a backup's files, and remove the agent's paths of these files."""

    async def backup_pins(self) -> set[tuple[str, str]]:
        """Return the VM's uid and the backup's id for each path of `pin_backup`."""

    async def protect_layers(self) -> bool:
        """Make all layers immutable. Return False if no layer exists."""

    async def remove_layers(self, names: Sequence[str]) -> None:
        """Remove layers by file name. Raises OSError."""

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        """Remove the agent's links to media outside of `sources`.

        No drive may have such a medium.
        """
