"""Starts the resolver's process, and finds a process that an earlier netd started."""

import os
import select
import signal
import socket
import struct
import sys

from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.resolver_channel import FIRST_CHANNEL, ResolverChannel, channel_on

RESOLVER = "virtbus.netd.resolver_process"
"""The package whose `__main__` is the program of the process."""
_CREDENTIALS = struct.Struct("=iII")
"""A `struct ucred`: process, user and group."""
_KILLED_S = 10.0


async def launch(argument: str) -> ResolverChannel:
    """Start the process, and return netd's end of its first channel.

    A child of netd forks the process and ends, so the process is no child of netd. The process has
    its own session. Of netd's descriptors, it keeps only its end of the channel.

    Raises:
        OSError: the process cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            await in_thread(lambda: _spawn(argument, theirs.fileno()))
        return await channel_on(ours)
    except BaseException:
        ours.close()
        raise


def _spawn(argument: str, channel: int) -> None:
    null = "/dev/null"
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", RESOLVER, argument],
        {**_environment(), "PYTHONSAFEPATH": "1"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, channel, FIRST_CHANNEL),
        ],
        setsid=True,
    )
    os.waitpid(pid, 0)


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("PYTHON")}


async def found_at(path: str) -> ResolverChannel | None:
    """Return a channel to the process of an earlier netd; None if no such process runs."""
    connection = _connected(path)
    return await channel_on(connection) if connection is not None else None


def kill_at(path: str) -> bool:
    """Kill the process that listens at `path`; return True once it has ended. Blocks.

    Return False if no other process listens at `path`, or if the process runs on after 10 s.
    """
    connection = _connected(path)
    if connection is None:
        return False
    with connection:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _uid, _gid = _CREDENTIALS.unpack(raw)
        if pid <= 0 or pid == os.getpid():
            return False
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return bool(select.select([process], [], [], _KILLED_S)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(process)


def _connected(path: str) -> socket.socket | None:
    """Return a non-blocking connection; None if nobody listens, or the queue is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection
