"""Implements the `GuestBackupPort` with libvirt, and without a hypervisor for simulated guests.

QEMU keeps a bitmap in the disks; a checkpoint is libvirt's metadata about a bitmap. libvirt removes
only the metadata here, because to remove a bitmap it would open frozen layers for writing. This
module removes bitmaps with QEMU's monitor.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import libvirt

from virtbus.nodeagent.core.guest_backups import (
    PushState,
    backup_xml,
    checkpoint_xml,
    common_bitmaps,
    description,
)
from virtbus.nodeagent.core.guest_layers import named_files
from virtbus.nodeagent.edge import qemu_monitor
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.schemas.backup import BITMAP
from virtbus.schemas.errors import Code, VirtbusError

Result = TypeVar("Result")
ASK_S = 45.0
"""Default time limit of a call. libvirt waits up to 30 s for the job lock of a domain."""
BEGIN_S = 60.0
_KEEP = libvirt.VIR_DOMAIN_JOB_STATS_KEEP_COMPLETED
_ENDED = libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED
_NO_DOMAIN = libvirt.VIR_DOMAIN_CHECKPOINT_XML_NO_DOMAIN
_BACKUP = libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP
_LOST = "backup job data missing"
"""libvirt's message if libvirtd died after it began a backup, and before it stored the job's data.
The next libvirtd keeps the job until the guest ends. After that end, the guest can start only after
one more restart of libvirtd (libvirt 9.0)."""


class LibvirtBackups:
    """The `GuestBackupPort` on libvirt."""

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links

    async def bitmaps(
        self, uid: str, targets: Collection[str], prefix: str = BITMAP, about: str = ""
    ) -> frozenset[str]:
        def run(domain: libvirt.virDomain) -> frozenset[str]:
            of_file = qemu_monitor.bitmaps(domain)
            files = named_files(domain.XMLDesc())
            known = {
                one.getName()
                for one in domain.listAllCheckpoints()
                if description(one.getXMLDesc(_NO_DOMAIN)) == about
            }
            disks = [of_file.get(files.get(target, ""), ()) for target in targets]
            found = common_bitmaps(disks) & known
            return frozenset(name for name in found if name.startswith(prefix))

        return await self._run(uid, run, "read the bitmaps") or frozenset()

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            with contextlib.suppress(libvirt.libvirtError):
                domain.jobStats(_ENDED)  # forget the end of an earlier backup
            xml = domain.XMLDesc()
            domain.backupBegin(
                backup_xml(xml, files, since),
                checkpoint_xml(xml, files, bitmap),
                libvirt.VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL,
            )

        await self._run(uid, run, "begin the backup", BEGIN_S)

    async def progress(self, uid: str) -> PushState:
        def run(domain: libvirt.virDomain) -> PushState:
            if not domain.isActive():
                return PushState()
            now = domain.jobStats()
            if now.get("operation") == _BACKUP and now["type"] != libvirt.VIR_DOMAIN_JOB_NONE:
                done, total = now.get("disk_processed", 0), now.get("disk_total", 0)
                return PushState("running", done, total)
            ended = domain.jobStats(_ENDED | _KEEP)
            if ended.get("operation") != _BACKUP:
                return PushState("lost")
            if ended["type"] == libvirt.VIR_DOMAIN_JOB_COMPLETED and ended.get("success", True):
                return PushState("done")
            return PushState("failed", why=str(ended.get("errmsg") or "QEMU ended the backup"))

        return await self._run(uid, run, "read the progress of the backup") or PushState()

    async def abort(self, uid: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            try:
                if domain.isActive() and domain.jobStats().get("operation") == _BACKUP:
                    domain.abortJob()
            except libvirt.libvirtError as error:
                if _LOST not in str(error):
                    raise
                raise _job_lost() from error

        await self._run(uid, run, "end the backup")

    async def keep_only(
        self, uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = BITMAP
    ) -> None:
        def goes(name: str) -> bool:
            if bitmaps is None:
                return name == drop
            return name.startswith(prefix) and name not in bitmaps

        def run(domain: libvirt.virDomain) -> None:
            for one in domain.listAllCheckpoints():
                if goes(one.getName()):
                    one.delete(libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)
            if domain.isActive():
                qemu_monitor.remove_bitmaps(domain, goes)

        await self._run(uid, run, "remove old bitmaps")

    async def _run(
        self,
        uid: str,
        work: Callable[[libvirt.virDomain], Result],
        doing: str,
        timeout_s: float = ASK_S,
    ) -> Result | None:
        return await on_ours(self._links, uid, work, doing, timeout_s=timeout_s)


class NoBackups:
    """The `GuestBackupPort` for simulated guests, which have no disks."""

    async def bitmaps(
        self, uid: str, targets: Collection[str], prefix: str = BITMAP, about: str = ""
    ) -> frozenset[str]:
        raise simulated()

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        raise simulated()

    async def progress(self, uid: str) -> PushState:
        return PushState()

    async def abort(self, uid: str) -> None:
        return None

    async def keep_only(
        self, uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = BITMAP
    ) -> None:
        return None


def _job_lost() -> VirtbusError:
    message = (
        "libvirtd died when it began a backup of this guest, and can begin no other: the guest "
        "runs on; stop the VM, restart libvirtd (other guests keep running), start the VM, then "
        "repeat"
    )
    return VirtbusError(Code.CONFLICT, "backup_lost", message)


def simulated() -> VirtbusError:
    """Return 422 `guest_simulated`: the guest has neither QEMU nor disks."""
    message = "the guests of this node are simulated: they have no disks; stop the VM, then repeat"
    return VirtbusError(Code.UNSUPPORTED, "guest_simulated", message)
