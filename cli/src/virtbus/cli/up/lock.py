"""Locks a state directory, so that only one `virtbus up` uses it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virtbus.cli.failures import CliError, Exit


def make(*directories: Path) -> None:
    """Create the missing directories, and check that all are writable.

    Raises:
        CliError: a directory cannot be created or written.
    """
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_ours(directory, error.strerror or str(error)) from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise _not_ours(directory, "it may not be written")


def _not_ours(directory: Path, why: str) -> CliError:
    return CliError(
        Exit.UNAVAILABLE,
        "not_writable",
        f"{directory} cannot be used: {why}",
        hint="name a directory of yours with --data DIR, or become root",
    )


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Lock the directory while the context is open; the lock also ends with the process.

    Raises:
        CliError: another `virtbus up` has the lock; the message names its process.
    """
    path = state_dir / "up.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            raise CliError(
                Exit.REFUSED,
                "already_up",
                f"virtbus up already runs on {state_dir} (process {holder or 'unknown'})",
                hint="stop that one, or name another place: virtbus up --data DIR --node NAME",
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
