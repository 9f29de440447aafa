"""Writes files atomically: temporary file, fsync, rename, fsync of the folder."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from virtbus.bus.runtime.threads import to_end
from virtbus.schemas.errors import Code, VirtbusError

_PARTS = itertools.count()

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work`, which may wait for a disk, in a thread, and return its result.

    A cancellation waits for the thread.
    """
    return await to_end(asyncio.get_running_loop().run_in_executor(None, work))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an OSError in the context to VirtbusError 503 `state_write`.

    Callers then try again.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot write under {folder}: {error.strerror}; free space there"
        raise VirtbusError(Code.UNAVAILABLE, "state_write", message) from error


def replace(
    path: Path,
    data: bytes,
    *,
    durable: bool = True,
    rename: Callable[[Path, Path], object] = Path.replace,
) -> None:
    """Replace the content of `path`. The file gets mode 0600 under any umask.

    With `durable`, the content is durable on return. Threads may replace a file at once, each with
    its own temporary file; the last rename wins. `rename` must move or remove the temporary file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{next(_PARTS)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    """Make renames and removals in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
