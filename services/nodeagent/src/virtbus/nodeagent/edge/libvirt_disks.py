"""Changes I/O limits of disks, and media of CD-ROM drives, in a running domain."""

from collections.abc import Mapping
from xml.etree import ElementTree as ET

import libvirt

from virtbus.nodeagent.core.disks import DriveState
from virtbus.nodeagent.edge.libvirt_errors import cause
from virtbus.schemas.errors import Code, VirtbusError

_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_LOCKED = ("is locked", "waiting to open tray")
"""Texts in QEMU's and libvirt's messages about a tray that the guest keeps closed."""


def set_limits(
    wanted: Mapping[str, Mapping[str, int]], domain: libvirt.virDomain
) -> dict[str, dict[str, int]] | None:
    """Set the limits of each disk where they differ from `wanted`; return the limits in force.

    Return None if no guest runs. `wanted` and the result map each disk's target to limits by name.
    """
    if not domain.isActive():
        return None
    figures = {}
    for target, limits in wanted.items():
        found = domain.blockIoTune(target, _LIVE)
        if _differ(found, limits):
            domain.setBlockIoTune(target, dict(limits), _LIVE)
            found = domain.blockIoTune(target, _LIVE)
        figures[target] = {name: value for name, value in found.items() if name in limits}
    return figures


def _differ(found: Mapping[str, object], wanted: Mapping[str, int]) -> bool:
    """Return True if a limit differs. A burst's length counts only if the burst is limited."""
    return any(
        found.get(name, 0) != value
        for name, value in wanted.items()
        if not name.endswith("_length") or wanted[name.removesuffix("_length")]
    )


def set_drives(wanted: Mapping[str, DriveState], domain: libvirt.virDomain) -> None:
    """Change each drive whose medium in libvirt's XML differs from `wanted`.

    Do nothing if no guest runs. Raise VirtbusError 409 `tray_locked` if the guest locks the tray.
    """
    if not domain.isActive():
        return
    found = media(domain.XMLDesc())
    for target, drive in wanted.items():
        if found.get(target, drive.path) == drive.path:
            continue
        try:
            force = libvirt.VIR_DOMAIN_DEVICE_MODIFY_FORCE if drive.force else 0
            domain.updateDeviceFlags(drive.xml, _LIVE | force)
        except libvirt.libvirtError as error:
            text = cause(error.get_error_message() or "")
            if not any(word in text for word in _LOCKED):
                raise
            message = f"the guest locks the tray of {target} ({text}); eject it in the guest"
            raise VirtbusError(Code.CONFLICT, "tray_locked", message) from error


def media(xml: str) -> dict[str, str]:
    """Return the path of each disk's file, by target; "" for an empty drive or a block device."""
    root = ET.fromstring(xml)  # noqa: S314  from libvirtd
    media = {}
    for disk in root.findall("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        if target is not None:
            media[target.get("dev", "")] = "" if source is None else source.get("file", "")
    return media
