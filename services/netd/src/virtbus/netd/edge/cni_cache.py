"""Stores results of CNI plugins as libcni does, for tools that read such files.

netd itself needs none of these files. The files are not in libcni's own folder. There, the garbage
collection of another runtime would take netd's attachments for leftovers and undo them.
"""

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from virtbus.netd.core.cni_verbs import CniPlace
from virtbus.netd.core.libcni_cache import cache_name
from virtbus.netd.edge.whole_file import replace

log = logging.getLogger(__name__)


class CniCache:
    """The folder `<state_dir>/netd/cni/results`. An OSError is only logged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, place: CniPlace, content: bytes) -> None:
        with _logged():
            path = self._directory / cache_name(place)
            try:
                replace(path, content)
            except FileNotFoundError:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace(path, content)

    def remove(self, place: CniPlace) -> None:
        with _logged():
            (self._directory / cache_name(place)).unlink(missing_ok=True)

    def prune(self, known: Collection[CniPlace]) -> None:
        names = {cache_name(place) for place in known}
        with _logged():
            for path in self._directory.glob("*") if self._directory.is_dir() else ():
                if path.name not in names:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        extra = {"code": "cni_cache_failed"}
        log.warning("a stored result of CNI cannot be changed: %s", error, extra=extra)
