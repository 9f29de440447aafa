"""Assigns PCI Express addresses: each device has its own root port.

The first ports are for NICs, the last ones are spare. vmwrapper adds the NICs without libvirt's
knowledge, so libvirt must not use their ports. Therefore all other devices have explicit addresses.
"""

from virtbus.nodeagent.core.element import Element, el

SPARE = 4
"""Free root ports for hot-plug."""


class PcieAllocator:
    """Assigns root ports in order, after those of NICs. Port n is the bus `pci.<n>` of QEMU."""

    def __init__(self, nics: int) -> None:
        self._next = 1 + nics

    def address(self) -> Element:
        """Return an address on the next free root port."""
        bus, self._next = self._next, self._next + 1
        return el(
            "address", type="pci", domain="0x0000", bus=f"0x{bus:02x}", slot="0x00", function="0x0"
        )

    def controllers(self) -> list[Element]:
        """Return the root bus and all root ports: for NICs, for assigned addresses, and spare."""
        count = self._next - 1 + SPARE
        return [
            el("controller", type="pci", index=0, model="pcie-root"),
            *(
                el("controller", type="pci", index=n, model="pcie-root-port")
                for n in range(1, count + 1)
            ),
        ]
