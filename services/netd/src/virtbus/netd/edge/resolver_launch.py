"""Starts the process that resolves names for guests, and finds that of an earlier netd."""

import os
import socket
import sys

from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.resolver_channel import FIRST_CHANNEL, ResolverChannel, channel_on

RESOLVER = "virtbus.netd.resolver_process"
"""The package that is the program."""


async def launch(argument: str) -> ResolverChannel:
    """Start the process with this argument; return netd's end of its first channel.

    The process is no child of netd: its first process ends after a fork. It has a session of its
    own, and none of netd's descriptors.

    Raises:
        OSError: it cannot be started.
    """
    return await channel_on(await in_thread(lambda: _spawned(argument)))


def _spawned(argument: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        null = "/dev/null"
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", RESOLVER, argument],
            {**_environment(), "PYTHONSAFEPATH": "1"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), FIRST_CHANNEL),
            ],
            setsid=True,
        )
    os.waitpid(pid, 0)
    return ours


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("PYTHON")}


async def found_at(path: str) -> ResolverChannel | None:
    """Return a channel to the process of an earlier netd; None without one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return await channel_on(connection)
