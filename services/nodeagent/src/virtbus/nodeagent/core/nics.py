"""Makes QEMU's devices of NICs, which vmwrapper adds without libvirt's knowledge (ADR 0009).

The devices are JSON, as libvirt's own devices are. QEMU would create devices in the older form
before their root ports exist.
"""

from collections.abc import Sequence
from functools import lru_cache

from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.nic import NicModel
from virtbus.schemas.vm import Interface
from virtbus.schemas.wire import spec_hash

Device = dict[str, str | int | bool]
DRIVERS = {
    NicModel.VIRTIO: "virtio-net-pci",
    NicModel.E1000: "e1000",
    NicModel.E1000E: "e1000e",
}
USUAL_MTU = 1500


def nic_id(index: int) -> str:
    """Return the QEMU id of the device of the start's interface `index`."""
    return f"vbnet{index}"


def netdev_id(index: int) -> str:
    """Return the QEMU id of the netdev of the start's interface `index`. netd adds the netdev."""
    return f"net{index}"


@lru_cache(maxsize=256)
def hardware_hash(nic: Interface) -> str:
    """Return a hash of the properties that a guest reads only when the device appears."""
    return spec_hash(nic.model_copy(update={"state": None, "limits": None}))[:8]


def nic_devices(nics: Sequence[Interface], made: Sequence[InterfaceStatus]) -> tuple[Device, ...]:
    """Return QEMU's `-device` of each NIC, on the first root ports. netd adds `netdev` and `mac`.

    `made` has netd's interfaces in the same order.
    """
    return tuple(
        _device(index, nic, seen) for index, (nic, seen) in enumerate(zip(nics, made, strict=True))
    )


def _device(index: int, nic: Interface, made: InterfaceStatus) -> Device:
    """Only a device from which the guest may boot has an option ROM."""
    device: Device = {
        "driver": DRIVERS[nic.model],
        "id": nic_id(index),
        "bus": f"pci.{index + 1}",
        "addr": "0x0",
    }
    if nic.boot_order is None:
        device["romfile"] = ""
    else:
        device["bootindex"] = nic.boot_order
    if nic.acpi_index is not None:
        device["acpi-index"] = nic.acpi_index
    if nic.model is NicModel.VIRTIO:
        device |= _virtio(made)
    return device


def _virtio(made: InterfaceStatus) -> Device:
    """Return the properties that only virtio has: the MTU, and several queues."""
    device: Device = {} if made.mtu == USUAL_MTU else {"host_mtu": made.mtu}
    if made.queues > 1:  # vectors: two for each queue, one for control, one for configuration
        device |= {"mq": True, "vectors": 2 * made.queues + 2}
    return device
