"""Starts, finds and ends the two processes of an interface with passt.

The relay and passt outlive netd. A later netd finds them by a name among their arguments
(`core.passt.process_name`). All functions block: call them in `in_thread`.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from virtbus.netd.core.passt import cause
from virtbus.netd.edge.passt_relay import CHANNEL, START_S, TAP
from virtbus.netd.edge.qemu_processes import processes, strings_of
from virtbus.schemas.errors import Code, VirtbusError

_RELAY = Path(__file__).with_name("passt_relay.py")
_ENDED_S = 5.0
_SAFE_FD = 16
"""The lowest number for netd's copies of the relay's descriptors. With lower numbers, the relay's
copy to `CHANNEL` might overwrite the descriptor that becomes `TAP`.
"""
_WORDS = 6
"""The name is one of the first six arguments: `python -I -S passt_relay.py NAME`."""


@contextmanager
def begun(words: Sequence[str], tap: int) -> Iterator["Beginning"]:
    """Start the relay with arguments and tap. Kill the relay if the body raises."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(START_S)
        process = os.pidfd_open(_spawn(words, theirs.fileno(), tap))
        theirs.close()
        try:
            yield Beginning(ours, process)
        except BaseException:
            kill(process)
            raise


class Beginning:
    """A relay that waits until netd has connected the new namespace with the network.

    The constructor raises VirtbusError 409 `passt_failed` if the relay sends no namespace.
    """

    def __init__(self, channel: socket.socket, process: int) -> None:
        self._channel = channel
        self.process = process
        """A pidfd of the relay. The caller closes the pidfd if the body of `begun` succeeds."""
        message, fds, _flags, _peer = socket.recv_fds(channel, 16, 1)
        if not fds:
            raise _failed(message.decode(errors="replace"))
        self.namespace = fds[0]
        """Passt's network namespace, which the caller closes."""

    def finish(self) -> None:
        """Start passt. Raises VirtbusError 409 `passt_failed`."""
        self._channel.sendall(b"1")
        said = b""
        while part := self._channel.recv(4096):
            said += part
        if said != b"ok":
            raise _failed(said.decode(errors="replace"))


def _failed(said: str) -> VirtbusError:
    message = (
        f"passt cannot serve the interface: {cause(said)}; if it lacks open files, list the "
        "interface's ports, or raise LimitNOFILE of virtbus-netd"
    )
    return VirtbusError(Code.CONFLICT, "passt_failed", message)


def _spawn(arguments: Sequence[str], channel: int, tap: int) -> int:
    null = "/dev/null"
    given = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _SAFE_FD) for fd in (channel, tap)]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_RELAY), *arguments],
            {},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, given[0], CHANNEL),
                (os.POSIX_SPAWN_DUP2, given[1], TAP),
            ],
            setsid=True,
        )
    finally:
        for fd in given:
            os.close(fd)


def found(name: str) -> dict[int, str]:
    """Return a pidfd of each process of an interface, with its first argument.

    The caller closes the pidfds. An interface is served while both processes run: the relay, and
    passt, whose first argument is `name`.
    """
    kept = {}
    for pid, arguments in processes("cmdline"):
        if name in arguments[:_WORDS]:
            with suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                if _has_name(pid, name):  # The pid may belong to another process by now.
                    kept[process] = arguments[0]
                else:
                    os.close(process)
    return kept


def _has_name(pid: int, name: str) -> bool:
    try:
        return name in strings_of(pid, "cmdline")[:_WORDS]
    except OSError:
        return False


def end(name: str) -> None:
    """End the processes of an interface, and return once they have ended.

    Raises:
        VirtbusError: 500 `passt_stays`: a process has not ended after 5 s.
    """
    limit_s = time.monotonic() + _ENDED_S
    while left := found(name):
        for process in left:
            kill(process)
        if time.monotonic() > limit_s:
            message = f"a process {name} of this host cannot be ended; see its state with `ps`"
            raise VirtbusError(Code.INTERNAL, "passt_stays", message)


def kill(process: int) -> None:
    """Kill a process, wait up to 5 s for its end, and close its pidfd."""
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], _ENDED_S)
    finally:
        forget(process)


def forget(process: int) -> None:
    """Close a pidfd, and reap an ended process of this netd."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
    os.close(process)
