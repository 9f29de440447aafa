"""Opens the file of an export, which imaged wrote, for the agent to read."""

import os
import stat
from pathlib import Path

from virtbus.nodeagent.core.disk_sources import DISKS
from virtbus.nodeagent.edge.disk_files import opened_beneath

EXPORTS = "exports"
"""`<state_dir>/disks/exports/<uid>/`: the folder of an export."""
CHUNK_BYTES = 256 * 1024


class ExportFile:
    """An opened export. `read` blocks on the disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, at: int) -> bytes:
        return os.pread(self._descriptor, CHUNK_BYTES, at)

    def close(self) -> None:
        os.close(self._descriptor)


def open_export(state_dir: Path, export: str, format_: str) -> ExportFile | None:
    """Open an export's file; return None if it is no plain file with exactly one name.

    imaged owns the folder. An attacker in imaged could hard-link any file there, and the agent, as
    root, would send the file. Only a file without another name is safe (ADR 0030).
    """
    try:
        with opened_beneath(state_dir / DISKS, (EXPORTS, export), f"disk.{format_}") as opened:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                return None
            return ExportFile(os.dup(opened))
    except OSError:
        return None
