"""Stores results of CNI plugins as libcni does, for a person with a tool that reads them.

netd itself needs none of these files. They are not in libcni's own folder: the garbage collection
of another runtime would take netd's attachments there for leftovers, and undo them.
"""

from collections.abc import Collection
from pathlib import Path

from virtbus.netd.core.cni_verbs import CniPlace, cache_name


class CniCache:
    """The folder `<state_dir>/netd/cni/results`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, place: CniPlace, content: bytes) -> None:
        """Replace the file of an attachment."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / cache_name(place)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(content)
        part.replace(path)

    def remove(self, place: CniPlace) -> None:
        """Remove the file of an attachment; no effect if there is none."""
        (self._directory / cache_name(place)).unlink(missing_ok=True)

    def prune(self, known: Collection[CniPlace]) -> None:
        """Remove all files but those of `known`."""
        names = {cache_name(place) for place in known}
        for path in self._directory.glob("*") if self._directory.is_dir() else ():
            if path.name not in names:
                path.unlink(missing_ok=True)
