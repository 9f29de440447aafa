"""Implements the `GuestLayerPort` with libvirt, and without a hypervisor for simulated guests."""

from collections.abc import Mapping

import libvirt

from virtbus.nodeagent.core.guest_layers import GuestLayers, named_files, switch_xml
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
            return GuestLayers(used, named_files(domain.XMLDesc()))

        return await on_ours(self._links, uid, run, "read the guest's disks", timeout_s=LOOK_S)

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            domain.snapshotCreateXML(switch_xml(domain.XMLDesc(), files), _FLAGS)

        await on_ours(self._links, uid, run, "freeze the disks", timeout_s=SWITCH_S)


class NoLayers:
    """The `GuestLayerPort` for simulated guests, which have no disks."""

    async def look(self, uid: str) -> GuestLayers | None:
        raise _simulated()

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        raise _simulated()


def _simulated() -> VirtbusError:
    message = "the guests of this node are simulated: they have no disks; stop the VM, then repeat"
    return VirtbusError(Code.UNSUPPORTED, "guest_simulated", message)
