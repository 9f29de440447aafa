"""Stores the releases of addresses in their order, for the next start of netd.

The journal is a hint, so it needs no fsync. A lost line only means that another interface may get
the released address sooner.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from virtbus.netd.core.freed_addresses import Freed
from virtbus.netd.edge.whole_file import replace

log = logging.getLogger(__name__)

MOST = 4096
"""Lines that remain after a cut of the file. A cut comes at twice as many lines."""


class ReleaseJournal:
    """A file with a line for each release, the oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0

    def append(self, releases: Iterable[Freed]) -> None:
        """Add lines. Cut the file to `MOST` lines at more than 2 * `MOST` lines.

        An OSError, for example of a full disk, is only logged.
        """
        lines = [json.dumps(list(one)) for one in releases]
        if not lines:
            return
        try:
            with self._path.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
            self._lines += len(lines)
            if self._lines > 2 * MOST:
                self._write(self.all())
        except OSError as error:
            extra = {"code": "releases_not_stored"}
            log.warning("released addresses are not stored: %s", error, extra=extra)

    def all(self) -> list[Freed]:
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        self._lines = len(lines)
        return list(filter(None, map(_read, lines[-MOST:])))

    def _write(self, releases: Sequence[Freed]) -> None:
        lines = "".join(f"{json.dumps(list(one))}\n" for one in releases)
        replace(self._path, lines.encode())
        self._lines = len(releases)


def _read(line: str) -> Freed | None:
    try:
        network, owner, address = json.loads(line)
    except (ValueError, TypeError):
        return None
    return Freed(str(network), str(owner), str(address))
