"""Describes the files of a running guest's disks, and defines the port that changes them."""

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
    """The guest-visible size in bytes of each file that QEMU's devices use."""
    named: Mapping[str, str] = field(default_factory=dict)
    """The files of writable disks in libvirt's XML, by target."""
    below: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files below each disk in libvirt's XML, from the top, by target."""
    used_below: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """QEMU's list of the files below each used file, from the top."""
    inodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """True if libvirt's XML is outdated: it names a file that QEMU does not use."""
        return not set(self.named.values()) <= self.used.keys()

    def layers(self, target: str) -> tuple[str, ...]:
        """Return the files between a disk and its image, as QEMU reports them.

        libvirt's XML must agree about these files, because a copy (`pull`) finds its files by the
        XML.

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
        below = self.below.get(target, ())
        return below[-1] if below and is_image(below[-1]) else ""

    def uses(self, files: Mapping[str, str]) -> bool:
        """Return True if QEMU uses all of `files`; False for no files."""
        return bool(files) and set(files.values()) <= self.used.keys()


def layers_differ() -> VirtbusError:
    """Return 409 `layers_differ`: libvirt would change a file that the guest no longer uses."""
    return VirtbusError(Code.CONFLICT, "layers_differ", DIFFERS)


def is_image(path: str) -> bool:
    """Return True for the path of an image.

    All other files below a disk are layers. imaged or the agent chose their paths.
    """
    return Path(path).parts[-3:-1] == (IMAGES, DATA)


def named_files(xml: str) -> dict[str, str]:
    """Return the files of writable disks in a running domain's XML, by target."""
    found = {}
    for disk in ET.fromstring(xml).iterfind("devices/disk"):  # noqa: S314  from libvirtd
        source, target = disk.find("source"), disk.find("target")
        if source is None or target is None or disk.find("readonly") is not None:
            continue
        if file := source.get("file"):
            found[target.get("dev", "")] = file
    return found


def source_indexes(xml: str) -> dict[str, dict[str, str]]:
    """Return the files of each disk, from the top, with libvirt's index of each file, by target.

    QEMU's node name of a file contains the index.
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
    """Return the files below each disk in a running domain's XML, from the top, by target."""
    return {target: (*files,)[1:] for target, files in source_indexes(xml).items()}


def switch_xml(xml: str, files: Mapping[str, str]) -> str:
    """Return libvirt's request to let the domain `xml` continue in `files`, by target.

    The request excludes the other disks by name, because libvirt would choose files for unnamed
    disks.
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
    """Changes the files of running guests' disks. Raises VirtbusError as `Hypervisor` does."""

    async def look(self, uid: str) -> GuestLayers | None:
        """Return the files that the guest uses now; None if libvirt reports no running guest.

        The answer waits for a running switch, even a switch of an earlier agent.
        """

    async def switch(self, uid: str, files: Mapping[str, str]) -> None:
        """Let all disks continue in `files`, by target, at one instant.

        After an error, `look` shows which files the guest uses.
        """

    async def pull(self, uid: str, target: str, base: str) -> None:
        """Begin to copy the files below a disk into the disk, down to but without `base`.

        An empty `base` copies all files. After the copy, a call of `pulls` flushes the disk and
        detaches the copied files.
        """

    async def pulls(self, uid: str) -> Mapping[str, tuple[int, int]]:
        """Detach the layers that `pull` has copied, and return the progress of the other copies.

        The progress is the bytes done and the total bytes, by target.
        """

    async def end_pulls(self, uid: str) -> None:
        """End all copies of `pull` for a guest."""
