"""Defines the devices of a running guest, and the port that changes its disks.

A volume's disk has an id that contains its name (`disks.volume_alias`). By this id, the agent finds
the disk again without own state.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.metadata import nics_at_start, noted_disks
from virtbus.schemas.vm import MIB, VmRecord


@dataclass(frozen=True, slots=True)
class GuestDevices:
    """The devices of a running guest."""

    aliases: frozenset[str] = frozenset()
    """The ids of the disks; empty for disks without an id."""
    ports: frozenset[int] = frozenset()
    """The used root ports, including those of the start's NICs."""
    root_ports: int = 0
    has_scsi: bool = False
    noted_addresses: Addresses = field(default_factory=dict)
    noted_hashes: Mapping[str, str] = field(default_factory=dict)
    """Addresses of devices, and hashes of disks, in the domain's metadata.

    The metadata gets them before a disk is attached, so that some may not be attached yet.
    """

    def has(self, alias: str) -> bool:
        return alias in self.aliases


@dataclass(frozen=True, slots=True)
class GuestDisks:
    """A guest's disks after the agent's last changes, and the pending changes."""

    addresses: Addresses = field(default_factory=dict)
    """The addresses of all devices in this run, or in the last run."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """The hashes of the disks that are volumes, by name."""
    detached: frozenset[str] = frozenset()
    """The disks that the record detaches and the guest has released."""
    pending: Mapping[str, str] = field(default_factory=dict)
    """The pending change of each disk and its reason, by name."""


def wanted_sizes(record: VmRecord) -> dict[str, int]:
    """Return the requested size in bytes of each disk that can grow, by name."""
    sizes = {}
    for volume in record.spec.volumes:
        ref = record.volume_refs.get(volume.name)
        if ref is not None and not ref.abilities.grow:
            continue
        if ref is not None:
            sizes[volume.name] = _sectors(ref.size_bytes)
        elif volume.image is not None and volume.image.size is not None:
            sizes[volume.name] = _sectors(volume.image.size)
        elif volume.empty_disk is not None:
            sizes[volume.name] = volume.empty_disk.capacity // MIB * MIB
    return sizes


def _sectors(size_bytes: int) -> int:
    """Round up to whole sectors, as imaged does."""
    return -(-size_bytes // 512) * 512


def guest_devices(xml: str) -> GuestDevices:
    """Return the devices in the XML of a running domain."""
    root = ET.fromstring(xml)  # noqa: S314  from libvirtd
    devices = root.find("devices")
    if devices is None:
        return GuestDevices()
    # libvirt does not know the NICs of the start (ADR 0009), which have the first ports
    ports = set(range(1, 1 + len(nics_at_start(root))))
    aliases, root_ports, has_scsi = set(), 0, False
    for device in devices:
        address, alias = device.find("address"), device.find("alias")
        root_ports += device.get("model") == "pcie-root-port"
        if address is not None and address.get("type") == "pci":
            ports.add(_number(address.get("bus", "")))
        if device.tag == "disk":
            aliases.add("" if alias is None else alias.get("name", ""))
        has_scsi |= device.tag == "controller" and device.get("type") == "scsi"
    noted = noted_disks(root)
    return GuestDevices(frozenset(aliases), frozenset(ports), root_ports, has_scsi, *noted)


def _number(bus: str) -> int:
    return int(bus, 16) if re.fullmatch(r"0x[0-9a-f]{1,4}", bus) else 0


class DiskPlugs(Protocol):
    """Changes the disks of running guests. Raises VirtbusError as `Hypervisor` does.

    Each call can be repeated, even after a crash during the call.
    """

    async def devices(self, uid: str) -> GuestDevices | None:
        """Return the guest's devices; None if no guest runs."""

    async def note(self, uid: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        """Store addresses, and hashes of disks, in the domain's metadata."""

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        """Attach devices, given as XML, to the running guest."""

    async def detach(self, uid: str, alias: str) -> None:
        """Ask the guest to release the disk `alias`.

        `devices` lacks the disk once it is released.
        """

    async def close_left(self, uid: str) -> None:
        """Close the files that QEMU still has open although libvirt has detached their disks."""

    async def grow(self, uid: str, sizes: Mapping[str, int]) -> None:
        """Grow the disks that are smaller than `sizes` (bytes, by target).

        The guest sees the new sizes at once. Also raises 409 `layers_differ`.
        """
