"""Opens files by directory descriptor without following any symlink (IMG-17)."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""The flags to open a file. O_NONBLOCK prevents a hang on a FIFO."""


PASSABLE = 0o711
"""Mode of a directory that QEMU's user may traverse but not list."""


def make_passable(path: Path) -> None:
    """Create `path` and its missing parents; give them and `path` exactly the mode PASSABLE."""
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        directory.chmod(PASSABLE)


def open_directory(name: str, dir_fd: int, mode: int) -> int:
    """Return a descriptor of the directory `name` in `dir_fd`; make it with `mode` if missing."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return os.open(name, _DIRECTORY, dir_fd=dir_fd)
    descriptor = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    os.fchmod(descriptor, mode)  # independent of the umask
    return descriptor


def open_file(name: str, dir_fd: int, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of the regular file `name` in `dir_fd`.

    Raises:
        OSError: ELOOP for a symlink, EINVAL for any other file that is not regular.
    """
    descriptor = os.open(name, flags | _FILE, mode, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


@contextmanager
def opened_directory(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor of an existing directory; close it at the end of the context."""
    descriptor = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_beneath(root: str, parts: Sequence[str]) -> int:
    """Return a read-only descriptor of the file `parts` below `root`.

    Only `root` may contain symlinks. `parts` come from `core.sources.beneath`, which refuses `..`.
    Raises as `open_file`.
    """
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            deeper = os.open(part, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = deeper
        return open_file(parts[-1], current)
    finally:
        os.close(current)


def read_small(name: str, dir_fd: int, max_bytes: int) -> bytes:
    """Return the first `max_bytes` of a regular file; raises as `open_file`."""
    descriptor = open_file(name, dir_fd)
    try:
        return os.pread(descriptor, max_bytes, 0)
    finally:
        os.close(descriptor)


def replace(name: str, data: bytes, dir_fd: int) -> None:
    """Write `name` atomically: temporary file, fsync, rename."""
    temporary = f".tmp-{name}"
    descriptor = open_file(temporary, dir_fd, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


@contextmanager
def reading(name: str, dir_fd: int) -> Iterator[int]:
    """Yield a read-only descriptor of a regular file; raises as `open_file`."""
    descriptor = open_file(name, dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def names(dir_fd: int) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(os.listdir(dir_fd))


def remove(name: str, dir_fd: int) -> bool:
    """Unlink `name`; return False if it was missing."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True
