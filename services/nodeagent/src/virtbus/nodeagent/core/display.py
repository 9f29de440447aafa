"""A guest's display: KubeVirt's VGA with 16 MiB and one head, and VNC that listens nowhere.

The agent gets a connection of QEMU's from libvirt (virDomainOpenGraphicsFD), so there is no port
and no socket file that anybody else could reach (reliability.md CON-03, CON-04).
"""

from virtbus.nodeagent.core.element import Element, el
from virtbus.schemas.vm import VmSpec

VIDEO_KIB = 16 * 1024


def display_elements(spec: VmSpec) -> list[Element]:
    """Nothing for a VM that did not ask for one.

    The video device is no PCI Express one: it sits on the root itself, where libvirt keeps the
    first slot for it, and takes no root port.
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
