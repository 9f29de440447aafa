"""A file that is being fetched: written, hashed, and resumable after a crash."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable

from virtbus.imaged.core.formats import HEAD_BYTES, TAIL_BYTES
from virtbus.imaged.core.links import PartNote
from virtbus.imaged.edge import beneath
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.wire import encode_json, read

CHUNK_BYTES = 1024**2
CHECKPOINT_BYTES = 64 * 1024**2
"""How often a resumable part is made durable: what a crash may cost in bytes."""
NOTE_SUFFIX = ".json"
_ZEROS = bytes(64)
_FICLONE = 0x40049409
"""linux/fs.h"""


def disk_full(message: str) -> VirtbusError:
    """503 `disk_full`; the caller may come back when there is room."""
    return VirtbusError(
        Code.UNAVAILABLE,
        "disk_full",
        f"{message}; free some space or remove unused images, then it is tried again",
    )


class Part:
    """One file in `part/`. All methods block on the disk; call them one at a time, off the loop.

    `check_room(bytes)` raises `disk_full` before the free-space floor would be crossed. The note
    beside the file names only bytes that are durable, so that a power cut cannot leave holes
    that a resumed and unpinned transfer would take for contents.
    """

    def __init__(
        self,
        key: str,
        dir_fd: int,
        check_room: Callable[[int], None],
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self.key = key
        self._dir_fd = dir_fd
        self._check_room = check_room
        self._checkpoint_bytes = checkpoint_bytes
        self._hash = hashlib.sha256()
        self.offset = 0
        self._durable = 0
        self.note: PartNote | None = None
        self._fd = beneath.open_file(key, dir_fd, os.O_RDWR | os.O_CREAT)

    def resume(self, url: str) -> bool:
        """Take over what an earlier process left of `url`, hashing it again; False: from zero."""
        note = read_note(self.key, self._dir_fd)
        size = os.fstat(self._fd).st_size
        if note is None or note.url != url or not 0 < note.done_bytes <= size:
            self.restart(None)
            return False
        os.ftruncate(self._fd, note.done_bytes)
        self.note = note
        return True

    def hash_more(self) -> bool:
        """Hash the next chunk of what is in the file already; False when all of it is."""
        chunk = os.pread(self._fd, CHUNK_BYTES, self.offset)
        self._hash.update(chunk)
        self.offset += len(chunk)
        self._durable = self.offset
        return bool(chunk)

    def restart(self, note: PartNote | None) -> None:
        """Forget all bytes; `note` says whose bytes come next, None that they cannot resume."""
        beneath.remove(self.key + NOTE_SUFFIX, self._dir_fd)
        os.ftruncate(self._fd, 0)
        self._hash = hashlib.sha256()
        self.offset = self._durable = 0
        self.note = note

    def expect(self, more_bytes: int) -> None:
        """Raise `disk_full` now where so many bytes would not fit, not after most of them."""
        self._check_room(more_bytes)

    def clone(self, source_fd: int) -> bool:
        """Make this file a reflink of `source_fd` where the file system can; unhashed as yet."""
        try:
            fcntl.ioctl(self._fd, _FICLONE, source_fd)
        except OSError:
            return False
        return True

    def write(self, chunk: bytes) -> None:
        """Append and hash. Zeros become a hole.

        Raises:
            VirtbusError: `disk_full`, `store_error`.
        """
        try:
            if chunk.startswith(_ZEROS) and chunk.count(0) == len(chunk):
                os.ftruncate(self._fd, self.offset + len(chunk))
            else:
                self._check_room(len(chunk))
                view = memoryview(chunk)
                done = 0
                while done < len(view):
                    done += os.pwrite(self._fd, view[done:], self.offset + done)
            self._hash.update(chunk)
            self.offset += len(chunk)
            if self.note is not None and self.offset - self._durable >= self._checkpoint_bytes:
                self.checkpoint()
        except OSError as error:
            raise store_error(error) from error

    def checkpoint(self) -> None:
        """Make what there is durable and resumable; nothing where it cannot resume."""
        if self.note is None or self.offset == self._durable:
            return
        os.fdatasync(self._fd)
        self.note = self.note.model_copy(update={"done_bytes": self.offset})
        beneath.replace(self.key + NOTE_SUFFIX, encode_json(self.note), self._dir_fd)
        self._durable = self.offset

    @property
    def hex_digest(self) -> str:
        """SHA-256 of all bytes up to `offset`."""
        return self._hash.hexdigest()

    def head_and_tail(self) -> tuple[bytes, bytes]:
        """What `core.header.inspect` wants."""
        return read_head_and_tail(self._fd, self.offset)

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes of the file as fetched so far; short at its end."""
        return os.pread(self._fd, length, offset)

    def publish(self, data_fd: int, name: str) -> None:
        """Make the file durable and read-only and move it to `name` in `data_fd`."""
        try:
            os.fchmod(self._fd, 0o444)
            os.fsync(self._fd)
            os.rename(self.key, name, src_dir_fd=self._dir_fd, dst_dir_fd=data_fd)
            os.fsync(data_fd)
        except OSError as error:
            raise store_error(error) from error
        beneath.remove(self.key + NOTE_SUFFIX, self._dir_fd)

    def close(self, *, keep: bool) -> None:
        """Close; `keep` leaves a part that can resume, anything else is removed."""
        if self._fd < 0:
            return
        try:
            if keep and self.note is not None and self.offset:
                self.checkpoint()
            else:
                beneath.remove(self.key + NOTE_SUFFIX, self._dir_fd)
                beneath.remove(self.key, self._dir_fd)
        finally:
            os.close(self._fd)
            self._fd = -1


def read_note(key: str, dir_fd: int) -> PartNote | None:
    """The note beside a part, or None where there is none that can be read."""
    try:
        return read(PartNote, beneath.read_small(key + NOTE_SUFFIX, dir_fd, 16 * 1024))
    except (OSError, VirtbusError):
        return None


def read_head_and_tail(descriptor: int, size_bytes: int) -> tuple[bytes, bytes]:
    """The first `HEAD_BYTES` and the last `TAIL_BYTES` of a file of `size_bytes`."""
    head = os.pread(descriptor, min(HEAD_BYTES, size_bytes), 0)
    tail = os.pread(descriptor, TAIL_BYTES, max(0, size_bytes - TAIL_BYTES))
    return head, tail


def store_error(error: OSError) -> VirtbusError:
    """What the file system refused, as `disk_full` or `store_error`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full("the image store's disk is full")
    return VirtbusError(
        Code.UNAVAILABLE,
        "store_error",
        f"the image store cannot be written ({error.strerror}); check its disk and permissions",
    )
