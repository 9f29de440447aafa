"""PCI Express addresses: one root port for each device, then those of NICs and spare ones.

vmwrapper adds the NICs without libvirt's knowledge, so libvirt must never use their ports. Each of
our devices has an explicit address, so libvirt assigns none.
"""

from virtbus.nodeagent.core.element import Element, el

SPARE = 4
"""Free root ports for hot-plug."""


class PcieAllocator:
    """Assigns root ports in order; port n is the bus `pci.<n>` of QEMU."""

    def __init__(self, nics: int) -> None:
        self._next = 1 + nics

    def address(self) -> Element:
        """Return the next free slot."""
        bus, self._next = self._next, self._next + 1
        return el(
            "address", type="pci", domain="0x0000", bus=f"0x{bus:02x}", slot="0x00", function="0x0"
        )

    def controllers(self) -> list[Element]:
        """Return every root port: for NICs, used ones, and spare ones."""
        count = self._next - 1 + SPARE
        return [
            el("controller", type="pci", index=0, model="pcie-root"),
            *(
                el("controller", type="pci", index=n, model="pcie-root-port")
                for n in range(1, count + 1)
            ),
        ]


def nic_devices(count: int) -> tuple[dict[str, str], ...]:
    """Return QEMU's `-device` of each NIC, on the first root ports; netd adds netdev and mac.

    It is passed as JSON, like libvirt's own devices: QEMU creates plain ones earlier, before the
    root ports exist. There is no option ROM, because the guest boots from disk.
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
