"""Writes and hashes a partial download, which can resume after a crash."""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from typing import Protocol

from virtbus.imaged.core.formats import HEAD_BYTES, TAIL_BYTES
from virtbus.imaged.core.links import PartNote
from virtbus.imaged.edge import openat2
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.wire import encode_json, read

CHUNK_BYTES = 1024**2
CHECKPOINT_BYTES = 64 * 1024**2
"""Bytes between fsyncs of a resumable part. A crash loses at most about as many bytes."""
NOTE_SUFFIX = ".json"
_ZEROS = bytes(64)
_FICLONE = 0x40049409
"""The ioctl for a reflink, from linux/fs.h."""


def disk_full(message: str) -> VirtbusError:
    """Return 503 `disk_full`; the caller may repeat when there is space."""
    return VirtbusError(
        Code.UNAVAILABLE,
        "disk_full",
        f"{message}; free some space or remove unused images; imaged retries",
    )


def store_error(error: OSError, of: str = "the node's disk") -> VirtbusError:
    """Return the VirtbusError for an error of the file system: `disk_full` or `store_error`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full(f"{of} is full")
    return VirtbusError(
        Code.UNAVAILABLE,
        "store_error",
        f"{of} cannot be written ({error.strerror}); check it and its permissions",
    )


@contextlib.contextmanager
def translated(of: str = "the node's disk") -> Iterator[None]:
    """Raise VirtbusError 503 for an error of the file system `of`."""
    try:
        yield
    except OSError as error:
        raise store_error(error, of) from error


class Room(Protocol):
    """The room of one part in the store: `store_space.PartRoom`."""

    def __call__(self, more_bytes: int) -> None: ...
    def reserve(self, more_bytes: int) -> None: ...
    def release(self) -> None: ...


class PartialDownload:
    """One file in `part/`.

    All methods block on the disk. Call the methods one at a time, and never on the event loop.
    `room` raises `image_quota` or `disk_full` before a limit of the store is crossed. The metadata
    file counts only fsynced bytes. A power cut could leave holes in later bytes, and a resumed
    transfer without a pinned digest would take the holes for content. An error of the file system
    is raised as `disk_full` or `store_error`.
    """

    def __init__(
        self,
        key: str,
        dir_fd: int,
        room: Room,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self.key = key
        self._dir_fd = dir_fd
        self._room = room
        self._checkpoint_bytes = checkpoint_bytes
        self._hash = hashlib.sha256()
        self.offset = 0
        self._durable = 0
        self.note: PartNote | None = None
        self._untouched = True
        self._fd = openat2.open_file(key, dir_fd, os.O_RDWR | os.O_CREAT)

    @translated()
    def resume(self, url: str, *, whole: bool = False) -> bool:
        """Keep the bytes of an earlier part of `url`; drop them if no transfer can continue them.

        A complete part loses its last byte, because a server refuses an empty range. With `whole`
        the part keeps the byte, because the caller then sends no request. Return True if bytes are
        kept; the caller then hashes them by `hash_more`.
        """
        self._untouched = False
        note = read_note(self.key, self._dir_fd)
        size = os.fstat(self._fd).st_size
        if note is None or note.url != url or not 0 < note.done_bytes <= size:
            self.restart(None)
            return False
        last = 1 if note.done_bytes == note.total_bytes and not whole else 0
        os.ftruncate(self._fd, note.done_bytes - last)
        self.note = note
        return True

    @translated()
    def hash_more(self) -> bool:
        """Hash the next chunk of existing bytes; return False when all are hashed."""
        chunk = os.pread(self._fd, CHUNK_BYTES, self.offset)
        self._hash.update(chunk)
        self.offset += len(chunk)
        self._durable = self.offset
        return bool(chunk)

    @translated()
    def restart(self, note: PartNote | None) -> None:
        """Drop all bytes.

        `note` is the metadata of the bytes to come; None if no transfer can continue these bytes.
        """
        self._untouched = False
        openat2.remove(self.key + NOTE_SUFFIX, self._dir_fd)
        os.ftruncate(self._fd, 0)
        self._hash = hashlib.sha256()
        self.offset = self._durable = 0
        self.note = note

    def expect(self, more_bytes: int) -> None:
        """Reserve room for more bytes; raise `image_quota` or `disk_full` if they do not fit."""
        self._room.reserve(more_bytes)

    def clone(self, source_fd: int) -> bool:
        """Make this file a reflink of `source_fd`; return False if that is not supported.

        The caller then hashes the bytes by `hash_more`.
        """
        try:
            fcntl.ioctl(self._fd, _FICLONE, source_fd)
        except OSError:
            return False
        return True

    @translated()
    def write(self, chunk: bytes) -> None:
        """Append a chunk and hash it. A chunk of zeros becomes a hole.

        Raises:
            VirtbusError: `image_quota`, `disk_full`, `store_error`.
        """
        if chunk.startswith(_ZEROS) and chunk.count(0) == len(chunk):
            os.ftruncate(self._fd, self.offset + len(chunk))
        else:
            self._room(len(chunk))
            view = memoryview(chunk)
            done = 0
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], self.offset + done)
        self._hash.update(chunk)
        self.offset += len(chunk)
        if self.note is not None and self.offset - self._durable >= self._checkpoint_bytes:
            self.checkpoint()

    @translated()
    def checkpoint(self) -> None:
        """Fsync the bytes so far and count them in the metadata file.

        This has no effect on a part that no transfer can continue.
        """
        if self.note is None or self.offset == self._durable:
            return
        os.fdatasync(self._fd)
        self.note = self.note.model_copy(update={"done_bytes": self.offset})
        openat2.replace(self.key + NOTE_SUFFIX, encode_json(self.note), self._dir_fd)
        self._durable = self.offset

    @property
    def hex_digest(self) -> str:
        return self._hash.hexdigest()

    def head_and_tail(self) -> tuple[bytes, bytes]:
        return read_head_and_tail(self._fd, self.offset)

    def read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    @property
    def descriptor(self) -> int:
        return self._fd

    def written_bytes(self) -> int:
        """Return the space that the file takes, also if another process writes it."""
        return os.fstat(self._fd).st_blocks * 512

    @translated()
    def publish(self, data_fd: int, name: str) -> None:
        """Make the file durable and read-only, and move it to `name` in the directory `data_fd`."""
        os.fchmod(self._fd, 0o444)
        os.fsync(self._fd)
        os.rename(self.key, name, src_dir_fd=self._dir_fd, dst_dir_fd=data_fd)
        os.fsync(data_fd)
        openat2.remove(self.key + NOTE_SUFFIX, self._dir_fd)

    @translated()
    def close(self, *, keep: bool) -> None:
        """Close the file. It stays if `keep` is True and a transfer can resume it."""
        if self._fd < 0:
            return
        try:
            if keep and self.note is not None and self.offset:
                self.checkpoint()
            elif not (keep and self._untouched and read_note(self.key, self._dir_fd)):
                openat2.remove(self.key + NOTE_SUFFIX, self._dir_fd)
                openat2.remove(self.key, self._dir_fd)
        finally:
            os.close(self._fd)
            self._fd = -1
            self._room.release()


def read_note(key: str, dir_fd: int) -> PartNote | None:
    """Return the metadata of a part, or None if it is missing or unreadable."""
    try:
        return read(PartNote, openat2.read_small(key + NOTE_SUFFIX, dir_fd, 16 * 1024))
    except (OSError, VirtbusError):
        return None


def read_head_and_tail(descriptor: int, size_bytes: int) -> tuple[bytes, bytes]:
    """Return the first `HEAD_BYTES` and the last `TAIL_BYTES` of a file of `size_bytes`."""
    head = os.pread(descriptor, min(HEAD_BYTES, size_bytes), 0)
    tail = os.pread(descriptor, TAIL_BYTES, max(0, size_bytes - TAIL_BYTES))
    return head, tail
