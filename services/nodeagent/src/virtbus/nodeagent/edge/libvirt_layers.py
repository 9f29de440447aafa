"""Implements the `GuestLayerPort` with libvirt, and without a hypervisor for simulated guests."""

from collections.abc import Mapping
from pathlib import Path

import libvirt

from virtbus.nodeagent.core.guest_layers import (
    GuestLayers,
    files_below,
    is_image,
    named_files,
    source_indexes,
    switch_xml,
)
from virtbus.nodeagent.edge import qemu_monitor
from virtbus.nodeagent.edge.libvirt_backups import simulated
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.schemas.errors import Code, VirtbusError

LOOK_S = 45.0
"""Time limit of a call that does not switch layers. libvirt waits up to 30 s for the job lock of a
domain. A switch holds that lock while it runs."""
SWITCH_S = 60.0
_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
)


class LibvirtLayers:
    """The `GuestLayerPort` on libvirt."""

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links

    async def look(self, uid: str) -> GuestLayers | None:
        def run(domain: libvirt.virDomain) -> GuestLayers | None:
            if not domain.isActive():
                return None
            used = qemu_monitor.used_files(domain)
            inodes = {file: number for file in used if (number := _inode(file))}
            xml = domain.XMLDesc()
            return GuestLayers(
                {file: one.size_bytes for file, one in used.items()},
                named_files(xml),
                files_below(xml),
                {file: one.below for file, one in used.items()},
                inodes,
            )

        return await on_ours(self._links, uid, run, "read the guest's disks", timeout_s=LOOK_S)

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            domain.snapshotCreateXML(switch_xml(domain.XMLDesc(), files), _FLAGS)

        await on_ours(self._links, uid, run, "freeze the disks", timeout_s=SWITCH_S)

    async def pull(self, uid: str, target: str, base: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            names = source_indexes(domain.XMLDesc()).get(target, {})
            if not names or base not in {"", *names}:
                message = f"the disk {target} has just changed; the agent asks again"
                raise VirtbusError(Code.UNAVAILABLE, "domain_busy", message)
            disk, *_ = names.values()
            qemu_monitor.begin_copy(domain, target, disk, names.get(base, ""))

        await on_ours(self._links, uid, run, "merge the layers", timeout_s=LOOK_S)

    async def pulls(self, uid: str) -> Mapping[str, tuple[int, int]]:
        def run(domain: libvirt.virDomain) -> dict[str, tuple[int, int]]:
            _leave_layers(domain)
            return _pulls(domain)

        found = await on_ours(self._links, uid, run, "read the progress", timeout_s=LOOK_S)
        return found or {}

    async def end_pulls(self, uid: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            failed: libvirt.libvirtError | None = None
            for target in qemu_monitor.copies(domain) if domain.isActive() else ():
                qemu_monitor.end_copy(domain, target)
            for target in _pulls(domain):
                try:
                    domain.blockJobAbort(target, 0)
                except libvirt.libvirtError as error:
                    failed = error
            if failed is not None and _pulls(domain):  # without pulls, the goal is reached
                raise failed

        await on_ours(self._links, uid, run, "end the merge", timeout_s=LOOK_S)


class NoLayers:
    """The `GuestLayerPort` for simulated guests, which have no disks."""

    async def look(self, uid: str) -> GuestLayers | None:
        raise simulated()

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        raise simulated()

    async def pull(self, uid: str, target: str, base: str) -> None:
        raise simulated()

    async def pulls(self, uid: str) -> Mapping[str, tuple[int, int]]:
        return {}

    async def end_pulls(self, uid: str) -> None:
        return None


def _pulls(domain: libvirt.virDomain) -> dict[str, tuple[int, int]]:
    """Return (bytes done, total bytes) of QEMU's copies and libvirt's pulls, by target."""
    if not domain.isActive():
        return {}
    copies = qemu_monitor.copies(domain)
    found = {target: (one.done_bytes, one.total_bytes) for target, one in copies.items()}
    jobs = {target: domain.blockJobInfo(target, 0) for target in files_below(domain.XMLDesc())}
    return found | {
        target: (int(job["cur"]), int(job["end"]))
        for target, job in jobs.items()
        if job and job["type"] == libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_PULL
    }


def _leave_layers(domain: libvirt.virDomain) -> None:
    """Flush each disk whose copy is complete, and begin libvirt's pull of that disk.

    A pull changes the disk's header at its end, before QEMU writes the disk's tables to the file. A
    crash between the two would lose the copied data. So QEMU first copies the data and flushes the
    tables. libvirt's pull begins when nothing is left to copy.
    """
    if not domain.isActive():
        return
    whole = [target for target, one in qemu_monitor.copies(domain).items() if one.whole]
    for target in whole:
        names = source_indexes(domain.XMLDesc())[target]
        disk, *_ = names.values()
        lowest = [*names][-1]
        base = lowest if is_image(lowest) else None
        qemu_monitor.end_copy(domain, target)
        qemu_monitor.flush(domain, disk)
        domain.blockRebase(target, base, 0, 0)


def _inode(file: str) -> int:
    try:
        return Path(file).stat().st_ino
    except OSError:
        return 0
