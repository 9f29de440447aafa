"""Renders a guest's display, its directories, and the devices that report a failed guest.

The display has a VGA device as in KubeVirt (16 MiB, one head) and a VNC server. libvirt connects
the agent to VNC (virDomainOpenGraphicsFD). So there is no port and no socket file that others could
reach (CON-03, CON-04).
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
    """Return the VNC server and the video device; nothing for a VM without a display.

    The video device is not PCI Express. It is on the root bus, where libvirt reserves the first
    slot for it, and uses no root port.
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

    The source is an empty folder of the agent. `Shares.program` mounts the directory there, in a
    mount namespace of its own.
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

    Pvpanic uses an I/O port and no PCI slot. Guests without a driver ignore it.
    """
    panic = el("panic", model="isa")
    if watchdog is None:
        return [panic]
    action = watchdog.i6300esb.action
    address = port_address(addresses, WATCHDOG)
    return [panic, el("watchdog", address, model="i6300esb", action=action)]
