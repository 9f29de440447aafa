"""Finds layers that nothing needs any more (ADR 0061). The agent removes them, as root."""

from collections.abc import Callable, Iterable

from virtbus.imaged.edge.disk_files import FoundDisk
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.layer import UnneededLayers, layer_name


class LayerSweep:
    """Searches all headers for references to layers.

    During a search, a reference may move from a disk to a snapshot, or back, and the search may
    miss the reference. So a layer is unneeded only if two searches in a row find no reference.
    """

    def __init__(
        self,
        files: SnapshotFolders,
        disks: Callable[[], Iterable[FoundDisk]],
        threads: DiskThreads,
    ) -> None:
        """`disks` yields all disks, also those in snapshots and quarantine, and all layers."""
        self._files = files
        self._disks = disks
        self._threads = threads
        self._before: frozenset[str] = frozenset()

    async def unneeded(self) -> UnneededLayers:
        """Return the layers that this request and the previous request found without a user."""
        found = await self._threads.run(self._search)
        both, self._before = found & self._before, found
        return UnneededLayers(names=tuple(sorted(both)))

    def _search(self) -> frozenset[str]:
        """Return layers without a user; none if any header or description cannot be read."""
        names = self._files.layers.names()
        if not names:
            return names
        try:
            needed, below = self._of_notes(), self._of_disks()
        except (OSError, VirtbusError):
            return frozenset()
        if below is None:
            return frozenset()
        todo = [*needed, *(layer for name, layer in below.items() if name not in names)]
        needed = set()
        while todo:
            name = todo.pop()
            if name and name not in needed:
                needed.add(name)
                todo.append(below.get(name, ""))
        return names - needed

    def _of_notes(self) -> set[str]:
        notes = (note for note in self._files.notes() if note.layered)
        return {layer_name(note.ref.uid, disk.name) for note in notes for disk in note.disks}

    def _of_disks(self) -> dict[str, str] | None:
        """Return the layer below each disk, by the disk's path, and below each layer, by its name.

        Return None if the header of a disk or a layer cannot be read.
        """
        layers, found = str(self._files.layers.root), {}
        for disk in self._disks():
            if disk.is_unknown:
                return None
            folder, _, name = disk.file.rpartition("/")
            found[name if folder == layers else disk.file] = disk.layer
        return found
