"""PCI Express slots: one root port a device, those of the NICs and the spare ones after ours.

The NICs are added by vmwrapper behind libvirt's back, so libvirt must never give their ports away:
each of our devices has an explicit address, and libvirt has nothing left to place.
"""

from virtbus.nodeagent.core.element import Element, el

SPARE = 4
"""Free root ports for hot-plug (fast-start.md §4)."""
MAX_NICS = 8


class Slots:
    """Hands out root ports in order; port n is the bus `pci.<n>` of QEMU."""

    def __init__(self, nics: int) -> None:
        self._next = 1 + nics

    def address(self) -> Element:
        """The next free slot."""
        bus, self._next = self._next, self._next + 1
        return el(
            "address", type="pci", domain="0x0000", bus=f"0x{bus:02x}", slot="0x00", function="0x0"
        )

    def controllers(self) -> list[Element]:
        """Every root port: the NICs', the used, the spare."""
        count = self._next - 1 + SPARE
        return [
            el("controller", type="pci", index=0, model="pcie-root"),
            *(
                el("controller", type="pci", index=n, model="pcie-root-port")
                for n in range(1, count + 1)
            ),
        ]


def nic_devices(count: int) -> tuple[dict[str, str], ...]:
    """QEMU's `-device` of each NIC, on the first root ports; netdev and mac are netd's to add.

    It goes to QEMU as JSON, as libvirt's own devices do: QEMU makes the plain ones first, when the
    root ports are not there yet. No option ROM: the guest boots from disk.
    """
    return tuple(
        {
            "driver": "virtio-net-pci",
            "id": f"vbnet{index}",
            "bus": f"pci.{index + 1}",
            "addr": "0x0",
            "romfile": "",
        }
        for index in range(count)
    )
