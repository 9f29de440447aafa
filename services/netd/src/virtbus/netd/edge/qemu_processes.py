"""Finds QEMU processes in /proc, their VMs, and the namespaces of their taps."""

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


def processes(file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the pid of each process, and the NUL-separated strings of `/proc/<pid>/<file>`."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            pid = int(folder.name)
            with suppress(OSError):
                yield pid, strings_of(pid, file)


def strings_of(pid: int, file: str) -> list[str]:
    """Return the NUL-separated strings of `/proc/<pid>/<file>`; raises OSError."""
    return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")


class QemuProcesses:
    """The processes of one QEMU program. A vmwrapper process counts once it has become QEMU."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def running(self, uids: Container[str]) -> dict[str, int]:
        """Return the pid of each running VM among `uids`, by uid. Slow: it reads all of /proc."""
        programs = {str(self._program), str(self._program.resolve())}
        found: dict[str, int] = {}
        for pid, arguments in processes("cmdline"):
            if arguments[0] in programs:
                uuids = [value for flag, value in pairwise(arguments) if flag == "-uuid"]
                found |= {uid: pid for uid in uuids if uid in uids}
        return found

    def namespace(self, pid: int) -> int | None:
        """Return a descriptor of the network namespace of one open tap of a process.

        Return None if the process has ended, has no open tap, or is closed to netd. The sandbox of
        netd's systemd unit forbids the inspection. The caller closes the descriptor.
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
                except OSError:  # the tap was deleted
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
