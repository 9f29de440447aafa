"""Assigns the addresses of a domain's devices. Each device keeps its address, even over restarts.

libvirt and QEMU get every address explicitly. An address consists of numbers from sets such as the
root ports (`Pool`). A new device gets the lowest free number of each set that it needs. A removed
device frees its numbers, and no other device moves. The domain's metadata keeps the addresses as
last-applied state (`core/metadata.py`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from virtbus.schemas.disk import letters
from virtbus.schemas.vm import Disk, DiskBus, Domain

Pool = Literal[
    "port",  # root ports of PCI Express, from 1
    "vd",  # letters of virtio and NVMe disks; libvirt sees both as virtio disks (ADR 0044)
    "sd",  # letters of other disks
    "scsi",
    "sata",
    "usb",
]
Addresses = Mapping[str, Mapping[str, int]]
"""Numbers by `Pool` and device. The key of a disk is its name; in `port`, it is `of_disk(name)`."""
NONE: Addresses = MappingProxyType({})
SATA_PORTS = 6
"""Ports of one AHCI controller (QEMU: ich9-ahci)."""
SCSI, SERIAL, BALLOON, RNG, WATCHDOG, USB = "scsi", "serial", "balloon", "rng", "watchdog", "usb"
"""The keys of devices on root ports."""
ON_PCI = (DiskBus.VIRTIO, DiskBus.NVME)
_UNITS: Mapping[DiskBus, Pool] = {
    DiskBus.SCSI: "scsi",
    DiskBus.SATA: "sata",
    DiskBus.USB: "usb",
}


def of_disk(name: str) -> str:
    """Return the key of a disk among the root ports."""
    return f"disk/{name}"


def of_filesystem(name: str) -> str:
    """Return the key of a shared directory among the root ports."""
    return f"filesystem/{name}"


def of_sata(index: int) -> str:
    """Return the key of an additional AHCI controller among the root ports."""
    return f"sata{index}"


def assigned(
    domain: Domain,
    kept: Addresses = NONE,
    *,
    leaving: Collection[str] = (),
    busy: Collection[int] | None = None,
) -> dict[str, dict[str, int]]:
    """Return the addresses of all devices of a domain.

    `kept` has the addresses so far. `leaving` has names of disks that left the spec but not the
    guest. `busy` has the root ports that a running guest uses, including NICs; kept numbers then
    stay. `busy` is None if no guest runs. The NICs then get the first ports, and devices that had
    these ports move.
    """
    disks = domain.devices.disks
    numbers = _Numbers(kept, leaving)
    of_bus = {bus: [disk.name for disk in disks if disk.bus is bus] for bus in DiskBus}
    numbers.take("vd", of_bus[DiskBus.VIRTIO] + of_bus[DiskBus.NVME])
    numbers.take("sd", [disk.name for disk in disks if disk.bus not in ON_PCI])
    for bus, pool in _UNITS.items():
        numbers.take(pool, of_bus[bus])
    last_sata = max(numbers.found.get("sata", {}).values(), default=0)
    on_ports = list(_on_ports(domain, last_sata // SATA_PORTS))
    first = 1 + len(domain.devices.interfaces) if busy is None else 1
    numbers.take("port", on_ports, first=first, busy=busy or ())
    return numbers.found


def _on_ports(domain: Domain, sata_controllers: int) -> Iterator[str]:
    """Yield the devices on root ports, without NICs.

    `sata_controllers` excludes q35's own AHCI controller.
    """
    disks = domain.devices.disks
    yield from (of_disk(disk.name) for disk in disks if disk.bus in ON_PCI)
    if any(disk.bus is DiskBus.SCSI for disk in disks):
        yield SCSI
    yield from (of_sata(index) for index in range(1, 1 + sata_controllers))
    yield from (SERIAL, BALLOON, RNG)
    yield from (of_filesystem(one.name) for one in domain.devices.filesystems)
    if domain.devices.watchdog is not None:
        yield WATCHDOG
    if any(disk.bus is DiskBus.USB for disk in disks):
        yield USB


class _Numbers:
    """Gives devices the lowest free numbers of each `Pool`."""

    def __init__(self, kept: Addresses, leaving: Collection[str]) -> None:
        self._kept = kept
        self._leaving = {*leaving, *map(of_disk, leaving)}
        self.found: dict[str, dict[str, int]] = {}

    def take(
        self, pool: Pool, devices: Sequence[str], *, first: int = 0, busy: Collection[int] = ()
    ) -> None:
        """Add the numbers of `devices` to `found`. Replace kept numbers below `first`."""
        kept = self._kept.get(pool, {}).items()
        before = {name: number for name, number in kept if number >= first}
        stay = {name: number for name, number in before.items() if name in self._leaving}
        used = {*before.values(), *busy}
        free = first
        for device in devices:
            if device not in before:
                while free in used:
                    free += 1
                used.add(free)
            stay[device] = before.get(device, free)
        if stay:
            self.found[pool] = stay


def target(disk: Disk, addresses: Addresses) -> str:
    """Return libvirt's name of a disk, for example `vdb` for virtio and NVMe."""
    pool = "vd" if disk.bus in ON_PCI else "sd"
    return pool + letters(addresses[pool][disk.name])
