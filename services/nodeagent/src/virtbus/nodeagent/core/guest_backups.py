"""Describes backups and readings by a running guest's QEMU, and defines the ports for both.

In a backup, QEMU writes the disks to files. In a reading, QEMU serves the disks as NBD.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol
from xml.etree import ElementTree as ET

from virtbus.schemas.backup import BITMAP

CHANGES = "changes"
"""The name of the bitmap in each export of a reading."""


@dataclass(frozen=True, slots=True)
class PushState:
    """The state of a backup that QEMU writes to files.

    `none` means that no guest runs. `lost` means that the guest runs, but libvirt knows no backup,
    because a restart of libvirtd loses the result.
    """

    state: Literal["none", "running", "done", "failed", "lost"] = "none"
    done_bytes: int = 0
    total_bytes: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bitmap:
    """QEMU's description of a disk's dirty bitmap."""

    name: str
    usable: bool
    """True if the bitmap has all writes since its creation, and survives a stop of the guest."""


def common_bitmaps(disks: Collection[Collection[Bitmap]]) -> frozenset[str]:
    """Return the usable bitmaps that all disks have."""
    found = [{one.name for one in each if one.usable} for each in disks]
    return frozenset(set.intersection(*found)) if found else frozenset()


def backup_xml(xml: str, files: Mapping[str, str], since: str) -> str:
    """Return libvirt's request to write disks of the domain `xml` to `files`, by target.

    With the bitmap `since`, QEMU writes only data that is newer than the bitmap. The request
    excludes the other disks by name, because libvirt would choose files for unnamed disks.
    """
    request = ET.Element("domainbackup", mode="push")
    if since:
        ET.SubElement(request, "incremental").text = since
    disks = ET.SubElement(request, "disks")
    for name in _targets(xml):
        if name not in files:
            ET.SubElement(disks, "disk", name=name, backup="no")
            continue
        disk = ET.SubElement(disks, "disk", name=name, backup="yes", type="file")
        ET.SubElement(disk, "driver", type="qcow2")
        ET.SubElement(disk, "target", file=files[name])
    return ET.tostring(request, encoding="unicode")


def reading_xml(
    xml: str, files: Mapping[str, str], exports: Mapping[str, str], since: str, socket: str
) -> str:
    """Return libvirt's request to serve disks of the domain `xml` as NBD on a UNIX socket.

    `files`, by target, are for old data of blocks that the guest overwrites meanwhile. `exports`
    has the exports' names, by target. With the bitmap `since`, each export has a bitmap CHANGES
    that marks data newer than `since`.
    """
    request = ET.Element("domainbackup", mode="pull")
    if since:
        ET.SubElement(request, "incremental").text = since
    ET.SubElement(request, "server", transport="unix", socket=socket)
    disks = ET.SubElement(request, "disks")
    for name in _targets(xml):
        if name not in files:
            ET.SubElement(disks, "disk", name=name, backup="no")
            continue
        disk = ET.SubElement(
            disks, "disk", name=name, backup="yes", type="file", exportname=exports[name]
        )
        if since:
            disk.set("exportbitmap", CHANGES)
        ET.SubElement(disk, "driver", type="qcow2")
        ET.SubElement(disk, "scratch", file=files[name])
    return ET.tostring(request, encoding="unicode")


def served_socket(xml: str) -> str:
    """Return the socket in libvirt's XML of a reading; empty for a backup to files."""
    server = ET.fromstring(xml).find("server")  # noqa: S314  from libvirtd
    return "" if server is None else server.get("socket", "")


def checkpoint_xml(xml: str, targets: Collection[str], bitmap: str, about: str = "") -> str:
    """Return libvirt's request to make a bitmap in the disks `targets` at one instant.

    libvirt stores the description `about`.
    """
    request = ET.Element("domaincheckpoint")
    ET.SubElement(request, "name").text = bitmap
    if about:
        ET.SubElement(request, "description").text = about
    disks = ET.SubElement(request, "disks")
    for name in _targets(xml):
        if name in targets:
            ET.SubElement(disks, "disk", name=name, checkpoint="bitmap", bitmap=bitmap)
        else:
            ET.SubElement(disks, "disk", name=name, checkpoint="no")
    return ET.tostring(request, encoding="unicode")


def description(xml: str) -> str:
    """Return the description of a checkpoint."""
    return ET.fromstring(xml).findtext("description", "")  # noqa: S314  from libvirtd


def _targets(xml: str) -> list[str]:
    found = ET.fromstring(xml).iterfind("devices/disk/target")  # noqa: S314  from libvirtd
    return [target.get("dev", "") for target in found]


class GuestBackupPort(Protocol):
    """Lets the QEMU of a running guest write backups. Raises VirtbusError as `Hypervisor` does."""

    async def bitmaps(
        self, uid: str, targets: Collection[str], prefix: str = BITMAP, about: str = ""
    ) -> frozenset[str]:
        """Return the bitmaps on which a backup of the disks `targets` can rest.

        Each name begins with `prefix`. QEMU reports each bitmap as usable in all these disks.
        libvirt has a checkpoint of the same name with the description `about`.
        """

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        """Let QEMU write the present content of disks to `files`, by target, and make `bitmap`.

        With the bitmap `since`, QEMU writes only data that is newer than the bitmap.
        """

    async def progress(self, uid: str) -> PushState:
        """Return the state of the last backup."""

    async def abort(self, uid: str) -> None:
        """End a running backup, if any."""

    async def keep_only(
        self, uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = BITMAP
    ) -> None:
        """Remove the bitmaps with `prefix` that are not in `bitmaps`.

        If `bitmaps` is None, remove only the bitmap `drop`.
        """


@dataclass(frozen=True, slots=True)
class Reading:
    """The disks that QEMU serves to a reader."""

    id: str
    files: Mapping[str, str]
    """The agent's file names for overwritten blocks, by target."""
    exports: Mapping[str, str]
    """The names of the NBD exports, by target."""
    since: str
    """The earlier reading's bitmap, or empty."""
    bitmap: str
    """The bitmap that begins with this reading."""
    about: str = ""
    """The bitmap's description, which names the volumes of the disks."""


class GuestReadPort(Protocol):
    """Lets the QEMU of a running guest serve its disks.

    Raises VirtbusError as `Hypervisor` does.
    """

    async def begin(self, uid: str, reading: Reading) -> None:
        """Let QEMU serve the disks' present content on a socket of QEMU's user."""

    async def served(self, uid: str, reading: str) -> bool:
        """Return True while QEMU serves the reading, even a reading of an earlier agent."""

    async def end(self, uid: str, reading: str = "", *, off: bool = False) -> bool:
        """End QEMU's server of a reading, and remove its socket. The bitmap stays.

        An empty `reading` means any reading. Return False if the server may still run: libvirt does
        not know the guest, and the guest is not known as `off`.
        """
