"""Finds the disk file in a container image's layers, from the uppermost layer to the lowest.

A whiteout removes a file of lower layers (the OCI image specification, `layer.md`).
"""

from virtbus.imaged.core.archive import ArchiveEntry, printable
from virtbus.schemas.errors import Code, VirtbusError

DISK_FOLDER = "/disk"
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_KINDS = {
    "1": "a hard link",
    "2": "a symlink",
    "3": "a device",
    "4": "a device",
    "5": "a folder",
    "6": "a pipe",
}
MAX_NAMES = 1000
"""Limit of names in the disk's folder, over all layers."""


class Search:
    """Searches the image `what` for the file at `path`; without `path`, for the only file in /disk.

    Begin with the uppermost layer. Pass every entry of a layer to `is_disk`, then call
    `next_layer`.
    """

    def __init__(self, what: str, path: str) -> None:
        self.what = what
        names = tuple((path or f"{DISK_FOLDER}/").strip("/").split("/"))
        self._folder, self._leaf = (names[:-1], names[-1]) if path else (names, "")
        self.found = ""
        self.closed = False
        """True if no lower layer can change the answer."""
        self._above: set[str] = set()
        """Names in the disk's folder that upper layers have or have removed."""
        self._here: set[str] = set()
        self._removed: set[str] = set()
        self._opaque = False

    def is_disk(self, entry: ArchiveEntry) -> bool:
        """Return True if the entry is the searched file, whose data is the disk.

        Raises:
            VirtbusError: 422 `container_disk_many`: there are several such files, or too many
                names. 422 `container_disk_irregular`: the entry is no regular file, or a part of
                the path is no folder.
        """
        if not entry.parts:
            return False
        folder, name = entry.parts[:-1], entry.parts[-1]
        if name.startswith(_WHITEOUT):
            self._whiteout(folder, name)
            return False
        if entry.parts == self._folder[: len(entry.parts)]:
            if entry.kind != "5":
                raise self._irregular(entry)
            return False
        if folder != self._folder or (self._leaf and name != self._leaf):
            return False
        if entry.kind == "5" and not self._leaf:
            self._note(self._removed, name)
            return False
        return self._candidate(entry, name)

    def _candidate(self, entry: ArchiveEntry, name: str) -> bool:
        if name in self._above:
            return False
        if name in self._here or self.found:
            raise self._many(name)
        self._note(self._here, name)
        if entry.kind != "0":
            raise self._irregular(entry)
        self.found = "/" + "/".join(entry.parts)
        return True

    def _whiteout(self, folder: tuple[str, ...], name: str) -> None:
        if name == _OPAQUE:
            self._opaque |= folder == self._folder[: len(folder)]
            return
        target = (*folder, name.removeprefix(_WHITEOUT))
        if target == self._folder[: len(target)]:
            self._opaque = True
        elif folder == self._folder:
            self._note(self._removed, target[-1])

    def _note(self, names: set[str], name: str) -> None:
        names.add(name)
        if len(names) + len(self._above) > MAX_NAMES:
            raise self._many(name)

    def next_layer(self) -> None:
        self._above |= self._here | self._removed
        self._here, self._removed = set(), set()
        self.closed = self._opaque or (bool(self._leaf) and self._leaf in self._above)

    def missing(self) -> VirtbusError:
        if self._leaf:
            path = "/".join((*self._folder, self._leaf))
            why = f"has no file /{path}; give the path of its disk, or leave the path out"
        else:
            why = (
                f"is no containerDisk: it has no file in {DISK_FOLDER}; build one with "
                f"'FROM scratch' and 'ADD disk.qcow2 {DISK_FOLDER}/', or give the path of its disk"
            )
        return VirtbusError(Code.UNSUPPORTED, "container_disk_missing", f"{self.what} {why}")

    def _many(self, name: str) -> VirtbusError:
        names = f"{self.found or name} and {printable(name)[1:-1]}"
        return VirtbusError(
            Code.UNSUPPORTED,
            "container_disk_many",
            f"{self.what} has more than one file in {'/' + '/'.join(self._folder)} ({names}); "
            "give the path of the one that is the disk, or build it with one",
        )

    def _irregular(self, entry: ArchiveEntry) -> VirtbusError:
        path = printable("/" + "/".join(entry.parts))[1:-1]
        kind = _KINDS.get(entry.kind, f"of tar's kind {entry.kind!a}")
        return VirtbusError(
            Code.UNSUPPORTED,
            "container_disk_irregular",
            f"{path} of {self.what} is {kind}, no file; build the image with the disk itself "
            "there, or give its path",
        )
