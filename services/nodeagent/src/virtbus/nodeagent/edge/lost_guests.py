"""Finds QEMU processes of virtbus that libvirt has lost, and ends one on request (ADR 0061).

After libvirtd was killed, the next libvirtd may fail to read the state file of a guest. The guest's
QEMU then runs on, while libvirt reports that the guest does not run.
"""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from virtbus.nodeagent.core.domain_xml import domain_name
from virtbus.nodeagent.core.lost_guests import guest_lost
from virtbus.nodeagent.core.ports import DomainFacts, DomainState
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

PROC = Path("/proc")
_UUID = b"-uuid"
END_S = 10.0
"""Time limit for a killed process to end. It ends later only if the kernel waits for a disk."""


@dataclass(frozen=True, slots=True)
class Qemu:
    """A QEMU process of a VM of virtbus, on this host."""

    uid: str
    pid: int
    arguments: bytes

    def uses(self, folder: Path) -> bool:
        """Return True if the process was started with files below `folder`."""
        return os.fsencode(f"{folder}/") in self.arguments

    def has_open(self, file: os.stat_result) -> bool:
        """Return True if the process has `file` open, or if its open files cannot be read."""
        try:
            for name in (PROC / str(self.pid) / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(name.stat(), file):
                        return True
        except (FileNotFoundError, ProcessLookupError):
            return False  # the process has ended
        except OSError:
            return True
        return False

    @property
    def alive(self) -> bool:
        """Return True while this process runs. Another process may get its pid afterwards."""
        return _read(self.pid) == self

    def end(self) -> None:
        """Kill the process, but not another process that has got its pid.

        Raises:
            VirtbusError: 503 `guest_lost`: the process does not end within END_S.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive:  # compared after the open, so the handle is of the compared process
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not select.select([handle], [], [], END_S)[0]:
                message = f"QEMU (pid {self.pid}) does not end; see the kernel's log of this host"
                raise VirtbusError(Code.UNAVAILABLE, "guest_lost", message)
        finally:
            os.close(handle)


def qemus() -> dict[str, Qemu]:
    """Return the QEMU processes of virtbus by the uids of their VMs."""
    names = (path.name for path in PROC.iterdir())
    found = (_read(int(name)) for name in names if name.isdigit())
    return {qemu.uid: qemu for qemu in found if qemu is not None}


def _read(pid: int) -> Qemu | None:
    """Return process `pid` if its arguments show a QEMU of virtbus: a uid, and its domain's name.

    A process that has ended has no arguments, so None is returned.
    """
    try:
        arguments = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    words = arguments.split(b"\0")
    if _UUID not in words:
        return None
    uid = os.fsdecode(words[words.index(_UUID) + 1])
    name = os.fsencode(f"guest={domain_name(uid)}")
    if not any(word.partition(b",")[0] == name for word in words):
        return None
    return Qemu(uid, pid, arguments)


class LostGuests:
    """The guests that libvirt had lost when its domains were last listed."""

    def __init__(self) -> None:
        self._lost: dict[str, Qemu] = {}

    def compare(self, read: Callable[[], list[DomainFacts]]) -> list[DomainFacts]:
        """Return the domains of `read`. A lost guest has the state LOST, with or without a domain.

        libvirt knows a guest before its QEMU begins, and forgets it after its QEMU has ended. So
        the processes are read before the domains, and again after them.
        """
        processes, found = qemus(), read()
        known = {facts.uid for facts in found if facts.active}
        lost = {uid: qemu for uid, qemu in processes.items() if uid not in known and qemu.alive}
        self._lost = lost
        rest = [facts for facts in found if facts.uid not in lost]
        return rest + [lost_facts(qemu) for qemu in lost.values()]

    def of(self, uid: str) -> Qemu | None:
        """Return the process of a lost guest while it lives."""
        qemu = self._lost.get(uid)
        return qemu if qemu is not None and qemu.alive else None

    def refuse(self, uid: str) -> None:
        """Raise 409 `guest_lost` if libvirt has lost the guest."""
        if (qemu := self.of(uid)) is not None:
            raise guest_lost(qemu.pid)

    async def end(self, uid: str, *, forced: bool) -> None:
        """End the guest if it is lost and `forced` is set; no effect if it is not lost.

        Raises:
            VirtbusError: 409 `guest_lost`: the guest is lost and `forced` is not set.
                503 `guest_lost`: QEMU does not end.
        """
        if not forced:
            self.refuse(uid)
        elif (qemu := self.of(uid)) is not None:
            await in_thread(qemu.end)
            log.warning("ended a guest that libvirt had lost", extra={"uid": uid})


def lost_facts(qemu: Qemu) -> DomainFacts:
    """Return the facts of a lost guest. Its domain's metadata is unknown."""
    return DomainFacts(qemu.uid, DomainState.LOST, pid=qemu.pid)
