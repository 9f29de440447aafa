"""Describes the files that the disks of a running guest use, and the port that changes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.disk_sources import DATA, IMAGES
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
    """The files of writable disks that libvirt's XML names, by target."""
    below: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files below each disk in libvirt's XML, from the top, by target."""
    used_below: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files below each used file, from the top, as QEMU says."""
    inodes: Mapping[str, int] = field(default_factory=dict)
    """The inode numbers of the used files."""

    @property
    def differs(self) -> bool:
        """Return True if libvirt's XML is old: it names a file that QEMU does not use."""
        return not set(self.named.values()) <= self.used.keys()

    def layers(self, target: str) -> tuple[str, ...]:
        """Return the files between a disk and its image, as QEMU reports them.

        If there are such files, libvirt's XML must name the same files, because a copy finds its
        files by the XML.

        Raises:
            VirtbusError: 409 `layers_differ`: libvirt's XML names other files than QEMU uses.
        """
        named = self.named.get(target, "")
        if named not in self.used_below:
            raise layers_differ()
        below = self.used_below[named]
        layers = below[:-1] if below and is_image(below[-1]) else below
        if layers and below != self.below.get(target):
            raise layers_differ()
        return layers

    def image(self, target: str) -> str:
        """Return the image below a disk in libvirt's XML; empty without one."""
        below = self.below.get(target, ())
        return below[-1] if below and is_image(below[-1]) else ""

    def uses(self, files: Mapping[str, str]) -> bool:
        """Return True if QEMU uses all of the files; False if there are none."""
        return bool(files) and set(files.values()) <= self.used.keys()


def layers_differ() -> VirtbusError:
    """Return 409 `layers_differ`: libvirt would change a file that the guest does not use."""
    return VirtbusError(Code.CONFLICT, "layers_differ", DIFFERS)


def is_image(path: str) -> bool:
    """Return True for the path of an image.

    All other files below a disk are layers. imaged or the agent chose their paths.
    """
    return Path(path).parts[-3:-1] == (IMAGES, DATA)


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


def source_indexes(xml: str) -> dict[str, dict[str, str]]:
    """Return the files of each disk, from the top, with libvirt's indexes of them, by target.

    An index is part of the name of a file's node in QEMU.
    """
    found = {}
    for disk in ET.fromstring(xml).iterfind("devices/disk"):  # noqa: S314  from libvirtd
        target, files = disk.find("target"), dict[str, str]()
        node: ET.Element | None = disk
        while node is not None and (source := node.find("source")) is not None:
            files[source.get("file", "")] = source.get("index", "")
            node = node.find("backingStore")
        if target is not None:
            found[target.get("dev", "")] = files
    return found


def files_below(xml: str) -> dict[str, tuple[str, ...]]:
    """Return the files below each disk in the XML of a running domain, from the top, by target."""
    return {target: (*files,)[1:] for target, files in source_indexes(xml).items()}


def switch_xml(xml: str, files: Mapping[str, str]) -> str:
    """Return libvirt's request to let the domain of `xml` continue in `files`, by target.

    The request excludes the other disks by name. Otherwise libvirt would choose files for them.
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

    async def pull(self, uid: str, target: str, base: str) -> None:
        """Begin to copy the files below a disk into the disk, down to `base`, which is not copied.

        An empty `base` means that all files are copied. After the copy, a call of `pulls` flushes
        the disk, and lets it no longer use the copied files.
        """

    async def pulls(self, uid: str) -> Mapping[str, tuple[int, int]]:
        """Let disks no longer use layers that `pull` has copied; return the other copies' progress.

        The progress is the bytes done and the bytes in all, by target.
        """

    async def end_pulls(self, uid: str) -> None:
        """End all copies of `pull` for a guest; no effect without one."""
