"""Renders a guest's display, shared directories, and devices against a failed guest.

The display is a VGA device as in KubeVirt (16 MiB, one head) with a VNC server. libvirt connects
the agent to VNC by a descriptor (virDomainOpenGraphicsFD), so that no port or socket file is open
to others (CON-03, CON-04).
"""

from collections.abc import Sequence

from virtbus.nodeagent.core.addresses import WATCHDOG, Addresses, of_filesystem
from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.pcie import port_address
from virtbus.nodeagent.core.shares import Shares
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.watchdog import Watchdog

VIDEO_KIB = 16 * 1024


def display_elements(spec: VmSpec) -> list[Element]:
    """Return the VNC server and the video device; empty for a VM without a display.

    The video device is plain PCI: it uses the root bus, where libvirt reserves slot 1 for it.
    """
    if not spec.domain.devices.autoattach_graphics_device:
        return []
    return [
        el("graphics", el("listen", type="none"), type="vnc"),
        el(
            "video",
            el("model", type="vga", vram=str(VIDEO_KIB), heads="1", primary="yes"),
            el(
                "address",
                type="pci",
                domain="0x0000",
                bus="0x00",
                slot="0x01",
                function="0x0",
            ),
        ),
    ]


def filesystem_elements(
    filesystems: Sequence[Filesystem], shares: Shares, addresses: Addresses
) -> list[Element]:
    """Return the directories that the guest mounts by virtiofs.

    The source is an empty folder of the agent. `Shares.program` mounts the directory on it, in its
    own mount namespace.
    """
    return [
        el(
            "filesystem",
            el("driver", type="virtiofs"),
            el("binary", path=str(shares.program)),
            el("source", dir=str(shares.points[one.name])),
            el("target", dir=one.name),
            port_address(addresses, of_filesystem(one.name)),
            type="mount",
            accessmode="passthrough",
        )
        for one in filesystems
    ]


def memory_backing(filesystems: Sequence[Filesystem]) -> Element | None:
    """Return memory that virtiofsd shares with the guest; None without directories."""
    if not filesystems:
        return None
    return el("memoryBacking", el("source", type="memfd"), el("access", mode="shared"))


def guards(watchdog: Watchdog | None, addresses: Addresses) -> list[Element]:
    """Return pvpanic, and the watchdog if the spec has one.

    Guests without a driver ignore pvpanic. It uses an I/O port instead of a PCI slot.
    """
    panic = el("panic", model="isa")
    if watchdog is None:
        return [panic]
    action = watchdog.i6300esb.action
    address = port_address(addresses, WATCHDOG)
    return [panic, el("watchdog", address, model="i6300esb", action=action)]
