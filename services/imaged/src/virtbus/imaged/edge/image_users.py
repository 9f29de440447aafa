"""Finds the disks of a node and the images that they use. All methods block on the disk."""

import itertools
import time
from collections.abc import Iterator

from virtbus.imaged.edge.disk_files import FoundDisk
from virtbus.imaged.edge.layer_files import LayerFolder
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.quarantine import QuarantineFiles
from virtbus.imaged.edge.snapshot_files import SnapshotFolders


class ImageUsers:
    """The disks of VMs, volumes, snapshots and the quarantine, and all layers."""

    def __init__(self, pools: Pools, quarantine: QuarantineFiles) -> None:
        self._pools = pools
        self._quarantine = quarantine
        self._layers = LayerFolder(pools.files.root)

    def used(self) -> dict[str, set[str]]:
        """Return the users of images by digest: the uids of VMs, volumes and snapshots."""
        used: dict[str, set[str]] = {}
        for found in self.found():
            if found.digest:
                used.setdefault(found.digest, set()).add(found.uid.rpartition(".")[2])
        return used

    def used_since(self) -> tuple[dict[str, set[str]], int]:
        began_ns = time.monotonic_ns()
        return self.used(), began_ns

    def images_in_use(self) -> frozenset[str] | None:
        """Return the digests that disks use; None if the image of any disk is unknown."""
        try:
            disks = list(self.found())
        except OSError:
            return None
        if any(disk.is_unknown for disk in disks):
            return None
        return frozenset(disk.digest for disk in disks if disk.digest)

    def found(self) -> Iterator[FoundDisk]:
        """Yield all layers, and all disks that may rest on images.

        The disks of VMs are listed first and last, so that a disk that moves meanwhile is not
        missed.
        """
        frozen = SnapshotFolders(self._pools.files.root).find()
        volumes, quarantine = self._pools.local.find(), self._quarantine.find()
        fixed = (volumes, frozen, quarantine, self._layers.find())
        return itertools.chain(self._pools.files.find(), *fixed, self._pools.files.find())
