"""Describes the files that the disks of a running guest use, and the port that changes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from xml.etree import ElementTree as ET

from virtbus.schemas.errors import Code, VirtbusError

DIFFERS = (
    "libvirt does not know the files that the guest uses since its last snapshot: the guest runs "
    "on; stop and start the VM, then repeat"
)


@dataclass(frozen=True, slots=True)
class GuestLayers:
    """The files of a running guest's disks."""

    used: Mapping[str, int] = field(default_factory=dict)
    """The sizes in bytes that the guest sees, by the files that QEMU's devices use."""
    named: Mapping[str, str] = field(default_factory=dict)
    """The files that libvirt's XML names, by target."""

    @property
    def differs(self) -> bool:
        """Return True if libvirt names a file that QEMU does not use: then its XML is old."""
        return not set(self.named.values()) <= self.used.keys()

    def uses(self, files: Mapping[str, str]) -> bool:
        """Return True if QEMU uses all of the files."""
        return bool(files) and set(files.values()) <= self.used.keys()


def layers_differ() -> VirtbusError:
    """Return 409: libvirt would change another file than the one that the guest uses."""
    return VirtbusError(Code.CONFLICT, "layers_differ", DIFFERS)


def named_files(xml: str) -> dict[str, str]:
    """Return the files of the writable disks in the XML of a running domain, by target."""
    found = {}
    for disk in ET.fromstring(xml).iterfind("devices/disk"):  # noqa: S314  from libvirtd
        source, target = disk.find("source"), disk.find("target")
        if source is None or target is None or disk.find("readonly") is not None:
            continue
        if file := source.get("file"):
            found[target.get("dev", "")] = file
    return found


def switch_xml(xml: str, files: Mapping[str, str]) -> str:
    """Return libvirt's request to continue in `files`, by target, for the domain of `xml`.

    The other disks are named as well: libvirt would choose files for them.
    """
    request = ET.Element("domainsnapshot")
    disks = ET.SubElement(request, "disks")
    for target in ET.fromstring(xml).iterfind("devices/disk/target"):  # noqa: S314  from libvirtd
        name = target.get("dev", "")
        if name not in files:
            ET.SubElement(disks, "disk", name=name, snapshot="no")
            continue
        disk = ET.SubElement(disks, "disk", name=name, snapshot="external", type="file")
        ET.SubElement(disk, "driver", type="qcow2")
        ET.SubElement(disk, "source", file=files[name])
    return ET.tostring(request, encoding="unicode")


class GuestLayerPort(Protocol):
    """Changes the files of running guests' disks. Errors are as those of `Hypervisor`."""

    async def look(self, uid: str) -> GuestLayers | None:
        """Return the files that the guest uses now; None if libvirt says that no guest runs.

        The answer waits for a switch that is in progress, also one of an earlier agent.
        """

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        """Let the guest continue in `files`, by target, from one instant on.

        After an error, only `look` tells which files the guest uses.
        """
