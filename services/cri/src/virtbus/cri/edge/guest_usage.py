"""Reads a guest's use of the node: CPU time and memory of its emulator, and space of its disks.

The values come from /proc, from a pid file of libvirt, and from the metadata of the disks' files.
The reads are short, so they need no thread. A value that cannot be read is None.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from virtbus.schemas.ids import check_uid

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
_USER_TICKS, _RESIDENT_PAGES = 11, 1
"""The index of the user time in `/proc/<pid>/stat`, counted from the field after the name, and the
index of the resident memory in `/proc/<pid>/statm`."""


class Usage(NamedTuple):
    """The resources that a guest uses. None means that a value is unknown."""

    cpu_ns: int | None
    memory_bytes: int | None
    disk_bytes: int | None


class GuestUsage:
    """The usage of this node's guests.

    `libvirt` is the folder with the emulators' pid files. `disks` has a folder for each VM.
    """

    def __init__(self, libvirt: Path, disks: Path, proc: Path = Path("/proc")) -> None:
        self._libvirt = libvirt
        self._disks = disks
        self._proc = proc

    def of(self, uid: str) -> Usage:
        process = self._process(uid)
        cpu_ns = _cpu_ns(process) if process is not None else None
        memory_bytes = _memory_bytes(process) if process is not None else None
        return Usage(cpu_ns, memory_bytes, _disk_bytes(self._disks / uid))

    def _process(self, uid: str) -> Path | None:
        with suppress(OSError, ValueError):
            name = f"vb-{check_uid(uid)}"
            pid = int((self._libvirt / f"{name}.pid").read_text(encoding="ascii"))
            process = self._proc / str(pid)
            if name.encode() in (process / "cmdline").read_bytes():
                return process  # without the name, another process has the pid now
        return None


def _cpu_ns(process: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        words = (process / "stat").read_text(encoding="ascii", errors="replace")
        after_name = words.rpartition(")")[2].split()
        ticks = int(after_name[_USER_TICKS]) + int(after_name[_USER_TICKS + 1])
        return ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return None


def _memory_bytes(process: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        pages = int((process / "statm").read_text(encoding="ascii").split()[_RESIDENT_PAGES])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def _disk_bytes(folder: Path) -> int | None:
    """Return the bytes that the files of a VM's own disks take; None without files."""
    with suppress(OSError):
        sizes = [path.lstat().st_blocks * _BLOCK_BYTES for path in folder.glob("*.qcow2")]
        return sum(sizes) if sizes else None
    return None
