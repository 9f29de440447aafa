"""Describes backups and readings by the QEMU of a running guest, and the ports that begin them.

In a backup, QEMU writes the disks to files. In a reading, QEMU serves them to a reader, as NBD.
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

    `lost` means that the guest runs, and that libvirt knows neither a running backup nor the end of
    one: a restart of libvirtd loses the end. `none` means that no guest runs.
    """

    state: Literal["none", "running", "done", "failed", "lost"] = "none"
    done_bytes: int = 0
    total_bytes: int = 0
    why: str = ""
    """The reason for a failure."""


@dataclass(frozen=True, slots=True)
class Bitmap:
    """A dirty bitmap of a disk, as QEMU describes it."""

    name: str
    usable: bool
    """True if it has all writes since it was made, and survives a stop of the guest."""


def common_bitmaps(disks: Collection[Collection[Bitmap]]) -> frozenset[str]:
    """Return the usable bitmaps that all disks have."""
    found = [{one.name for one in each if one.usable} for each in disks]
    return frozenset(set.intersection(*found)) if found else frozenset()


def backup_xml(xml: str, files: Mapping[str, str], since: str) -> str:
    """Return libvirt's request to write disks to `files`, by target, for the domain of `xml`.

    With `since`, the name of a bitmap, QEMU writes only data that is newer than the bitmap. The
    request excludes the other disks by name. Otherwise libvirt would choose files for them.
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
    """Return libvirt's request to serve disks as NBD on a UNIX socket, for the domain of `xml`.

    QEMU saves data that the guest overwrites meanwhile in `files`, by target. `exports` are the
    names of the exports, by target. With `since`, the name of a bitmap, each export has a bitmap
    CHANGES that marks the data that is newer than `since`.
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
    """Return the socket in libvirt's XML of a backup; empty if the backup serves no disks."""
    server = ET.fromstring(xml).find("server")  # noqa: S314  from libvirtd
    return "" if server is None else server.get("socket", "")


def checkpoint_xml(xml: str, targets: Collection[str], bitmap: str, about: str = "") -> str:
    """Return libvirt's request to make a bitmap in the disks `targets` at the same instant.

    libvirt keeps the description `about`.
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
    """Lets the QEMU of a running guest write backups. Errors are as those of `Hypervisor`."""

    async def bitmaps(
        self, uid: str, targets: Collection[str], prefix: str = BITMAP, about: str = ""
    ) -> frozenset[str]:
        """Return the bitmaps that a backup of the disks `targets` can rest on.

        Their names begin with `prefix`. QEMU reports each bitmap as usable in all these disks.
        libvirt knows a checkpoint of the same name, with the description `about`.
        """

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        """Let QEMU write the disks as they are now to `files`, by target, and make `bitmap`.

        With `since`, the name of a bitmap, QEMU writes only data that is newer than the bitmap.
        """

    async def progress(self, uid: str) -> PushState:
        """Return the state of the last backup; `none` if the guest has ended."""

    async def abort(self, uid: str) -> None:
        """End a backup that is being written; no effect without one."""

    async def keep_only(
        self, uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = BITMAP
    ) -> None:
        """Remove the bitmaps whose names begin with `prefix`, except `bitmaps`.

        If `bitmaps` is None, remove only the bitmap `drop`.
        """


@dataclass(frozen=True, slots=True)
class Reading:
    """The disks that QEMU serves to a reader."""

    id: str
    files: Mapping[str, str]
    """The agent's names of the files for overwritten blocks, by target."""
    exports: Mapping[str, str]
    """The names of the NBD exports, by target."""
    since: str
    """The bitmap of the earlier reading, or empty."""
    bitmap: str
    """The bitmap that is made when the reading begins."""
    about: str = ""
    """The bitmap's description, which names the volumes of the disks."""


class GuestReadPort(Protocol):
    """Lets the QEMU of a running guest serve its disks. Errors are as those of `Hypervisor`."""

    async def begin(self, uid: str, reading: Reading) -> None:
        """Let QEMU serve the disks, as they are now, on a socket of QEMU's user."""

    async def served(self, uid: str, reading: str) -> bool:
        """Return True while QEMU serves the reading, also if an earlier agent began it."""

    async def end(self, uid: str, reading: str = "", *, off: bool = False) -> bool:
        """End the server of a reading, and remove its socket. The bitmap stays.

        An empty `reading` means the server of any reading. The server of another reading stays.
        Return False if the server may still run: libvirt does not know the guest, and the caller
        does not know that the guest is `off`.
        """
