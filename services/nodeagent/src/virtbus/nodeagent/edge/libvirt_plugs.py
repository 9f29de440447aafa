"""Implements the `DiskPlugs` port with libvirt, and without a hypervisor for simulated guests."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import libvirt

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.guest_layers import layers_differ, named_files
from virtbus.nodeagent.core.metadata import NAMESPACE, PREFIX, with_disks
from virtbus.nodeagent.core.plugs import GuestDevices, guest_devices
from virtbus.nodeagent.edge import qemu_monitor
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks

TIMEOUT_S = 15.0
"""A call to a running QEMU may block for ever if that QEMU hangs (F9)."""
_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_METADATA = libvirt.VIR_DOMAIN_METADATA_ELEMENT
_ALREADY = "in the process of unplug"
"""A part of QEMU's answer to a repeated request. The guest has the first one."""
Result = TypeVar("Result")


class LibvirtPlugs:
    """The `DiskPlugs` port. A change of the metadata is durable, and that of a device is live."""

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links

    async def devices(self, uid: str) -> GuestDevices | None:
        return await self._on_guest(
            uid, lambda domain: guest_devices(domain.XMLDesc()), "read the devices"
        )

    async def note(self, uid: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            text = with_disks(domain.metadata(_METADATA, NAMESPACE), addresses, disks)
            flags = _LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
            domain.setMetadata(_METADATA, text, PREFIX, NAMESPACE, flags)

        await self._on_guest(uid, run, "store the addresses")

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            for xml in devices:
                domain.attachDeviceFlags(xml, _LIVE)

        await self._on_guest(uid, run, "attach the disk")

    async def detach(self, uid: str, alias: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            try:
                domain.detachDeviceAlias(alias, _LIVE)
            except libvirt.libvirtError as error:
                text = error.get_error_message() or ""
                gone = error.get_error_code() == libvirt.VIR_ERR_DEVICE_MISSING
                if not gone and _ALREADY not in text:
                    raise

        await self._on_guest(uid, run, "detach the disk")

    async def close_left(self, uid: str) -> None:
        await self._on_guest(uid, qemu_monitor.close_left, "close the disk")

    async def grow(self, uid: str, sizes: Mapping[str, int]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            for target, size_bytes in sizes.items():
                if domain.blockInfo(target)[0] < size_bytes:
                    _refuse_old(domain, target)
                    domain.blockResize(target, size_bytes, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)

        await self._on_guest(uid, run, "grow the disk")

    async def _on_guest(
        self, uid: str, work: Callable[[libvirt.virDomain], Result], doing: str
    ) -> Result | None:
        """Run `work` on an active domain; return None if there is none."""

        def run(domain: libvirt.virDomain) -> Result | None:
            return work(domain) if domain.isActive() else None

        return await on_ours(self._links, uid, run, doing, timeout_s=TIMEOUT_S)


def _refuse_old(domain: libvirt.virDomain, target: str) -> None:
    """Raise 409 `layers_differ` if libvirt would grow another file than that of the guest."""
    named = named_files(domain.XMLDesc()).get(target)
    if named not in qemu_monitor.used_files(domain):
        raise layers_differ()


class NoPlugs:
    """The `DiskPlugs` port for simulated guests, which have no devices that could change."""

    async def devices(self, uid: str) -> GuestDevices | None:
        """Return None."""

    async def note(self, uid: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        """Do nothing."""

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        """Do nothing."""

    async def detach(self, uid: str, alias: str) -> None:
        """Do nothing."""

    async def close_left(self, uid: str) -> None:
        """Do nothing."""

    async def grow(self, uid: str, sizes: Mapping[str, int]) -> None:
        """Do nothing."""
