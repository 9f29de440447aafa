"""Finds QEMU processes of virtbus that libvirt has lost, and ends one on request (ADR 0061).

After a kill of libvirtd, the next libvirtd may fail to read the state file of a guest. The guest's
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
"""Time limit for a killed process to end. Only a process that waits for a disk takes longer."""


@dataclass(frozen=True, slots=True)
class Qemu:
    """A QEMU process of a VM of virtbus on this host."""

    uid: str
    pid: int
    arguments: bytes

    def uses(self, folder: Path) -> bool:
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
        """Return True while this process runs; False if another process has got its pid."""
        return _read(self.pid) == self

    def end(self) -> None:
        """Kill the process; do nothing if another process has got its pid.

        Raises:
            VirtbusError: 503 `guest_lost`: the process does not end within END_S.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive:  # checked after the open, so that the handle is of this process
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
    """Return process `pid` if its arguments have a uid and the name of that VM's domain.

    Return None for other processes, and for a process that has ended, which has no arguments.
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
        """Return the domains of `read` and all lost guests, which have the state LOST.

        libvirt knows a guest before its QEMU begins, and until its QEMU has ended. So a guest is
        lost only if its QEMU is found before `read` and still runs after `read`.
        """
        processes, found = qemus(), read()
        known = {facts.uid for facts in found if facts.active}
        lost = {uid: qemu for uid, qemu in processes.items() if uid not in known and qemu.alive}
        self._lost = lost
        rest = [facts for facts in found if facts.uid not in lost]
        return rest + [lost_facts(qemu) for qemu in lost.values()]

    def of(self, uid: str) -> Qemu | None:
        """Return the process of a lost guest; None if the guest is not lost or has ended."""
        qemu = self._lost.get(uid)
        return qemu if qemu is not None and qemu.alive else None

    def refuse(self, uid: str) -> None:
        if (qemu := self.of(uid)) is not None:
            raise guest_lost(qemu.pid)

    async def end(self, uid: str, *, forced: bool) -> None:
        """End the guest if it is lost and `forced` is set. Do nothing if the guest is not lost.

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
    """Return the facts of a lost guest. The metadata of its domain is unknown."""
    return DomainFacts(qemu.uid, DomainState.LOST, pid=qemu.pid)
