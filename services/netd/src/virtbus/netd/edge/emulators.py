"""The emulators of this host, from /proc: who runs a VM, and where its taps are."""

import ctypes
import fcntl
import os
from collections.abc import Container, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_TUN = Path("/dev/net/tun")
_TUNGETDEVNETNS = 0x54E3
_SYS_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


class Emulators:
    """Processes of one program; a wrapper that has not become it yet is none."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def running(self, uids: Container[str]) -> dict[str, int]:
        """The pid of each of `uids` that runs. Reads all of /proc: not for the hot path."""
        programs = {str(self._program), str(self._program.resolve())}
        found: dict[str, int] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with suppress(OSError):
                arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if arguments[0] not in programs:
                    continue
                for flag, value in pairwise(arguments):
                    if flag == "-uuid" and value in uids:
                        found[value] = int(folder.name)
        return found

    def namespace(self, pid: int) -> int | None:
        """A descriptor of the network namespace of the first tap that a process holds open.

        None also where we may not look into the process, as in the sandbox of the systemd unit.
        """
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            for fd in _taps(pid):
                copy = _libc.syscall(_SYS_PIDFD_GETFD, process, fd, 0)
                if copy < 0:
                    continue
                try:
                    return fcntl.ioctl(copy, _TUNGETDEVNETNS)
                except OSError:  # of a tap that was deleted
                    continue
                finally:
                    os.close(copy)
        finally:
            os.close(process)
        return None


def _taps(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if path.readlink() == _TUN:
                    yield int(path.name)
