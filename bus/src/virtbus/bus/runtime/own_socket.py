"""Owns the path of a UNIX socket to which only the user of this process may connect."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virtbus.schemas.errors import Code, VirtbusError


@contextmanager
def own_path(path: Path) -> Iterator[None]:
    """Make `path` free for the caller's socket, and remove the socket at the end.

    An old socket at `path` is removed. The caller holds the lock of the state folder, so the old
    socket's process has ended.

    Raises:
        VirtbusError: 409 `socket_taken`: `path` is no socket.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        message = f"{path} is no socket; remove it, or set another path by VIRTBUS_LISTEN"
        raise VirtbusError(Code.CONFLICT, "socket_taken", message)
    path.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def close_to_others(path: Path) -> None:
    """Allow only the owner to connect to the socket at `path`."""
    path.chmod(0o600)
