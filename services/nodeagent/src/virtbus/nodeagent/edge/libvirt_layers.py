"""Implements the `GuestLayerPort` with libvirt, and without a hypervisor for simulated guests."""

from collections.abc import Collection, Mapping

import libvirt

from virtbus.nodeagent.core.guest_layers import GuestLayers, files_below, named_files, switch_xml
from virtbus.nodeagent.edge import qemu_monitor
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.schemas.errors import Code, VirtbusError

LOOK_S = 45.0
"""libvirt waits up to 30 s for the job lock of a domain, which a switch in progress has."""
SWITCH_S = 60.0
_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
)


class LibvirtLayers:
    """The `GuestLayerPort`."""

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links

    async def look(self, uid: str) -> GuestLayers | None:
        def run(domain: libvirt.virDomain) -> GuestLayers | None:
            if not domain.isActive():
                return None
            used = qemu_monitor.used_files(domain)
            xml = domain.XMLDesc()
            return GuestLayers(used, named_files(xml), files_below(xml))

        return await on_ours(self._links, uid, run, "read the guest's disks", timeout_s=LOOK_S)

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            domain.snapshotCreateXML(switch_xml(domain.XMLDesc(), files), _FLAGS)

        await on_ours(self._links, uid, run, "freeze the disks", timeout_s=SWITCH_S)

    async def pull(self, uid: str, target: str, base: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            domain.blockRebase(target, base or None, 0, 0)

        await on_ours(self._links, uid, run, "merge the layers", timeout_s=LOOK_S)

    async def pulled(self, uid: str, target: str) -> tuple[int, int] | None:
        def run(domain: libvirt.virDomain) -> tuple[int, int] | None:
            found = domain.blockJobInfo(target, 0) if domain.isActive() else None
            return (int(found["cur"]), int(found["end"])) if found else None

        return await on_ours(self._links, uid, run, "read the progress", timeout_s=LOOK_S)

    async def end_pulls(self, uid: str, targets: Collection[str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            for target in targets:
                if domain.isActive() and domain.blockJobInfo(target, 0):
                    domain.blockJobAbort(target, 0)

        await on_ours(self._links, uid, run, "end the merge", timeout_s=LOOK_S)


class NoLayers:
    """The `GuestLayerPort` for simulated guests, which have no disks."""

    async def look(self, uid: str) -> GuestLayers | None:
        raise _simulated()

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        raise _simulated()

    async def pull(self, uid: str, target: str, base: str) -> None:
        raise _simulated()

    async def pulled(self, uid: str, target: str) -> tuple[int, int] | None:
        return None

    async def end_pulls(self, uid: str, targets: Collection[str]) -> None:
        return None


def _simulated() -> VirtbusError:
    message = "the guests of this node are simulated: they have no disks; stop the VM, then repeat"
    return VirtbusError(Code.UNSUPPORTED, "guest_simulated", message)
