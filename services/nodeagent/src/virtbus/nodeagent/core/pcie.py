"""Renders PCI Express addresses: each device has its own root port.

The first ports are for NICs; the last ports are spare. vmwrapper adds the NICs without libvirt's
knowledge. All other devices have explicit addresses (`core/addresses.py`), so that libvirt never
uses the NICs' ports.
"""

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.element import Element, el

SPARE = 4
"""Free root ports for hot-plug."""


def port_address(addresses: Addresses, device: str) -> Element:
    """Return the address of a device. Port n is the bus `pci.<n>` of QEMU."""
    bus = addresses["port"][device]
    return el(
        "address", type="pci", domain="0x0000", bus=f"0x{bus:02x}", slot="0x00", function="0x0"
    )


def pci_controllers(addresses: Addresses) -> list[Element]:
    """Return the root bus and all root ports: for NICs, for assigned addresses, and spare."""
    count = max(addresses["port"].values()) + SPARE
    return [
        el("controller", type="pci", index=0, model="pcie-root"),
        *(
            el("controller", type="pci", index=n, model="pcie-root-port")
            for n in range(1, count + 1)
        ),
    ]
