"""Keeps the image store within its quota, and within the disk space that it must leave free.

All numbers come from the file system, so a crash leaves no wrong count.
"""

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.core.links import PartNote, is_hex_digest
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.partial_download import NOTE_SUFFIX, disk_full, read_note
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quantity import format_bytes

log = logging.getLogger(__name__)

MAX_PART_AGE_S = 24 * 3600
_MEASURE_AGAIN_S = 1.0
_BLOCK_BYTES = 512

MakeRoom = Callable[[Callable[[], int]], None]
"""Removes unused images. Its argument returns the number of bytes that are still missing."""


class StoreSpace:
    """Counts the bytes in `data/` and `part/`.

    Methods block on the disk, and any thread may call them.
    """

    def __init__(self, data_fd: int, parts_fd: int, limits: SpaceLimits) -> None:
        self._data_fd = data_fd
        self._parts_fd = parts_fd
        self._limits = limits
        self._lock = threading.Lock()
        self._reserving = threading.Lock()
        self._open: dict[str, int] = {}
        """Parts in use, each with the size that its transfer has announced."""
        self._data: tuple[float, int] | None = None
        self._make_room: MakeRoom = _nothing

    @property
    def quota_bytes(self) -> int:
        return self._limits.quota_bytes

    def make_room_by(self, make_room: MakeRoom) -> None:
        self._make_room = make_room

    def used_bytes(self) -> int:
        return self._data_bytes() + sum(_sizes(self._parts_fd).values())

    def image_sizes(self) -> dict[str, int]:
        return {f"sha256:{name}": size for name, size in _sizes(self._data_fd).items()}

    def changed(self) -> None:
        self._data = None

    def room(self, part: str) -> "PartRoom":
        with self._lock:
            self._open[part] = 0
        return PartRoom(self, part)

    def reserve(self, part: str, more_bytes: int) -> None:
        """Check `more_bytes`, and count them as used by the part from now on."""
        with self._reserving:
            self.check(part, more_bytes)
            with self._lock:
                self._open[part] = _sizes(self._parts_fd).get(part, 0) + more_bytes

    def release(self, part: str) -> None:
        with self._lock:
            self._open.pop(part, None)

    def check(self, part: str, more_bytes: int) -> None:
        """Make room for `more_bytes` of a part.

        Raises:
            VirtbusError: 413 `image_too_large`: more than the whole quota. 503 `image_quota`,
                `disk_full`.
        """
        quota = self._limits.quota_bytes
        if quota and more_bytes > quota:
            raise VirtbusError(
                Code.TOO_LARGE,
                "image_too_large",
                f"{format_bytes(more_bytes)} are more than all images of this node may use: "
                f"{format_bytes(quota)} (setting quota_bytes)",
            )
        if self._missing_bytes(part, more_bytes) <= 0:
            return
        self._drop_idle_parts()
        self._make_room(lambda: self._missing_bytes(part, more_bytes))
        if self._over_quota_bytes(part, more_bytes) > 0:
            raise VirtbusError(
                Code.UNAVAILABLE,
                "image_quota",
                f"{format_bytes(more_bytes)} more do not fit into the {format_bytes(quota)} that "
                "images of this node may use (setting quota_bytes), and disks, transfers, uploaded "
                "images, records of VMs or pins use the "
                f"{format_bytes(self.used_bytes())} that are there; delete VMs and uploads that "
                "are not needed, remove pins, or raise the quota",
            )
        free_bytes, floor_bytes = self._free_and_floor_bytes()
        if free_bytes - more_bytes < floor_bytes:
            raise disk_full(
                f"the image store has {format_bytes(max(free_bytes, 0))} free and must keep "
                f"{format_bytes(floor_bytes)} (settings min_free_bytes, min_free_ratio); "
                f"{format_bytes(more_bytes)} more do not fit"
            )

    def sweep_parts(self) -> None:
        """Remove parts that cannot resume, or that are older than MAX_PART_AGE_S.

        Call this method at the start, before any transfer.
        """
        oldest = time.time() - MAX_PART_AGE_S
        names = set(openat2.names(self._parts_fd))
        keep: set[str] = set()
        for name in names:
            if is_hex_digest(name) and read_note(name, self._parts_fd) is not None:
                status = os.stat(name, dir_fd=self._parts_fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_mtime >= oldest:
                    keep |= {name, name + NOTE_SUFFIX}
        for name in names - keep:
            openat2.remove(name, self._parts_fd)

    def uploads_of(self, owner: str) -> frozenset[str]:
        return frozenset(name for name, note in _notes(self._parts_fd) if note.owner == owner)

    def drop_old_uploads(self) -> int:
        """Remove uploads that got no byte for MAX_PART_AGE_S; return their number."""
        oldest = time.time() - MAX_PART_AGE_S
        dropped = 0
        with self._lock:  # so that no part is opened meanwhile
            for name, note in _notes(self._parts_fd):
                if (
                    note.owner
                    and name not in self._open
                    and _changed_s(name, self._parts_fd) < oldest
                ):
                    _drop(name, self._parts_fd)
                    dropped += 1
        return dropped

    def drop(self, part: str) -> None:
        """Remove a part that is not needed any more; no effect while a transfer uses the part."""
        with self._lock:
            if part not in self._open:
                _drop(part, self._parts_fd)

    def _drop_idle_parts(self) -> None:
        """Remove parts that wait for another attempt, which then begins with no bytes."""
        with self._lock:  # so that no part is opened meanwhile
            for name in set(openat2.names(self._parts_fd)) - set(self._open):
                if is_hex_digest(name):  # other files are notes, maybe half written
                    _drop(name, self._parts_fd)

    def _missing_bytes(self, part: str, more_bytes: int) -> int:
        free_bytes, floor_bytes = self._free_and_floor_bytes()
        return max(
            self._over_quota_bytes(part, more_bytes), floor_bytes - (free_bytes - more_bytes)
        )

    def _over_quota_bytes(self, part: str, more_bytes: int) -> int:
        if not self._limits.quota_bytes:
            return 0
        with self._lock:
            expected: Mapping[str, int] = {**self._open, part: 0}
        sizes = _sizes(self._parts_fd)
        parts = {name: max(sizes.get(name, 0), expected.get(name, 0))
                 for name in {*sizes, *expected}}  # fmt: skip
        used_bytes = self._data_bytes() + sum(parts.values())
        return used_bytes + more_bytes - self._limits.quota_bytes

    def _free_and_floor_bytes(self) -> tuple[int, int]:
        disk = os.statvfs(self._data_fd)
        floor_bytes = self._limits.floor_bytes(disk.f_blocks * disk.f_frsize)
        return disk.f_bavail * disk.f_frsize, floor_bytes

    def _data_bytes(self) -> int:
        now_s, known = time.monotonic(), self._data
        if known is None or now_s - known[0] > _MEASURE_AGAIN_S:
            self._data = known = (now_s, sum(_sizes(self._data_fd).values()))
        return known[1]


class PartRoom:
    """The room of one part: a call checks that more bytes fit."""

    def __init__(self, space: StoreSpace, part: str) -> None:
        self._space = space
        self._part = part

    def __call__(self, more_bytes: int) -> None:
        """Check that this number of further bytes fits; errors as `StoreSpace.check`."""
        self._space.check(self._part, more_bytes)

    def reserve(self, more_bytes: int) -> None:
        self._space.reserve(self._part, more_bytes)

    def release(self) -> None:
        self._space.release(self._part)


def lock_store(root_fd: int, root: Path) -> None:
    """Lock the folder of a store until its descriptor is closed.

    Raises:
        VirtbusError: 409 `store_in_use`.
    """
    try:
        fcntl.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise VirtbusError(
            Code.CONFLICT,
            "store_in_use",
            f"another virtbus-imaged has the image store {root} open; stop it first, "
            "or give this one another state_dir",
        ) from None


def _notes(parts_fd: int) -> Iterator[tuple[str, PartNote]]:
    """Yield the parts that can resume."""
    for name in openat2.names(parts_fd):
        note = read_note(name, parts_fd) if is_hex_digest(name) else None
        if note is not None:
            yield name, note


def _changed_s(part: str, parts_fd: int) -> float:
    return os.stat(part, dir_fd=parts_fd, follow_symlinks=False).st_mtime


def _drop(part: str, parts_fd: int) -> None:
    openat2.remove(part + NOTE_SUFFIX, parts_fd)
    openat2.remove(part, parts_fd)


def _sizes(directory: int) -> dict[str, int]:
    """Return the disk space of each file. A file may vanish meanwhile."""
    sizes: dict[str, int] = {}
    for name in openat2.names(directory):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            sizes[name] = status.st_blocks * _BLOCK_BYTES
    return sizes


def _nothing(_missing_bytes: Callable[[], int]) -> None:
    """Remove nothing."""
