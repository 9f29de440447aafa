"""Implements the ports `LiveDevices` and `DiskPlugs`: the devices of running guests."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import libvirt

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.guest_layers import layers_differ, named_files
from virtbus.nodeagent.core.metadata import NAMESPACE, PREFIX, with_disks
from virtbus.nodeagent.core.plugs import GuestDevices, guest_devices
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_errors import cause
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.qemu_monitor import ask_to_release, close_left, has_nic, used_files

Result = TypeVar("Result")
CALL_TIMEOUT_S = 15.0
"""Time limit of a call to a running QEMU, which may block for ever if that QEMU hangs (F9)."""
_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_METADATA = libvirt.VIR_DOMAIN_METADATA_ELEMENT
_PENDING = ("already in the process of unplug", "unplug already in progress")
"""Parts of QEMU's messages about a device that the guest has already been asked to release."""


class LibvirtDevices:
    """The devices of running guests, on connections of `links`.

    libvirt does not know the NICs that a guest was started with (ADR 0009). So `detach_unknown` and
    `has_unknown` ask QEMU about such NICs. Only `note` also changes the domain's stored definition.
    """

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links

    async def live_xml(self, uid: str) -> str | None:
        return await self._of_active(uid, lambda domain: domain.XMLDesc(), "read the devices")

    async def devices(self, uid: str) -> GuestDevices | None:
        return await self._of_active(
            uid, lambda domain: guest_devices(domain.XMLDesc()), "read the devices"
        )

    async def note(self, uid: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            text = with_disks(domain.metadata(_METADATA, NAMESPACE), addresses, disks)
            flags = _LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
            domain.setMetadata(_METADATA, text, PREFIX, NAMESPACE, flags)

        await self._of_active(uid, run, "store the addresses")

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            for xml in devices:
                domain.attachDeviceFlags(xml, _LIVE)

        await self._of_active(uid, run, "plug a device")

    async def detach(self, uid: str, alias: str) -> None:
        def run(domain: libvirt.virDomain) -> None:
            try:
                domain.detachDeviceAlias(alias, _LIVE)
            except libvirt.libvirtError as error:
                text = cause(error.get_error_message() or "")
                gone = error.get_error_code() == libvirt.VIR_ERR_DEVICE_MISSING
                if not gone and not any(word in text for word in _PENDING):
                    raise

        await self._of_active(uid, run, "unplug a device")

    async def close_left(self, uid: str) -> None:
        await self._of_active(uid, close_left, "close the disk")

    async def grow(self, uid: str, sizes: Mapping[str, int]) -> None:
        def run(domain: libvirt.virDomain) -> None:
            for target, size_bytes in sizes.items():
                if domain.blockInfo(target)[0] < size_bytes:
                    _refuse_old(domain, target)
                    domain.blockResize(target, size_bytes, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)

        await self._of_active(uid, run, "grow the disk")

    async def detach_unknown(self, uid: str, number: int) -> None:
        await self._of_active(uid, ask_to_release(number), "unplug a NIC")

    async def has_unknown(self, uid: str, number: int) -> bool:
        return bool(await self._of_active(uid, has_nic(number), "look for a NIC"))

    async def _of_active(
        self, uid: str, work: Callable[[libvirt.virDomain], Result], doing: str
    ) -> Result | None:
        """Return the result of `work` on the domain; None if the domain is inactive or missing."""

        def run(domain: libvirt.virDomain) -> Result | None:
            return work(domain) if domain.isActive() else None

        return await on_ours(self._links, uid, run, doing, timeout_s=CALL_TIMEOUT_S)


def _refuse_old(domain: libvirt.virDomain, target: str) -> None:
    """Raise 409 `layers_differ` if libvirt names a file that is not among those that QEMU uses.

    libvirt would then grow the wrong file. A disk on a device or a server is not checked, because
    it has no layers.
    """
    named = named_files(domain.XMLDesc()).get(target)
    if named is not None and named not in used_files(domain):
        raise layers_differ()
