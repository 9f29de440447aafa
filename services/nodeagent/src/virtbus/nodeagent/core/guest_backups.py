"""Describes the backups that the QEMU of a running guest writes, and the port that begins them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol
from xml.etree import ElementTree as ET

from virtbus.schemas.backup import BITMAP

CHANGES = "changes"
"""The name of the bitmap in each export of a reading."""


@dataclass(frozen=True, slots=True)
class PushState:
    """The state of the files that QEMU writes.

    The end is known only to a libvirtd that saw it. `lost`: the guest runs, and libvirt knows of no
    backup, neither of one that runs nor of an end.
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
    """It counts all writes since it was made, and survives a stop of the guest."""


def common_bitmaps(disks: Collection[Collection[Bitmap]]) -> frozenset[str]:
    """Return the usable bitmaps that all disks have."""
    found = [{one.name for one in each if one.usable} for each in disks]
    return frozenset(set.intersection(*found)) if found else frozenset()


def backup_xml(xml: str, files: Mapping[str, str], since: str) -> str:
    """Return libvirt's request to write disks to `files`, by target, for the domain of `xml`.

    With `since`, the name of a bitmap, only what was written since it was made. The other disks are
    named as well: libvirt would choose files for them.
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

    `files`, by target, get what the guest overwrites meanwhile; `exports` are the names of the
    disks, by target. With `since`, the name of a bitmap, each has the bitmap CHANGES.
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
    """Return the socket of a backup that libvirt describes; empty if it serves none."""
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
        """Return the bitmaps of a `prefix` that all disks `targets` have, and libvirt can use.

        QEMU's own answer counts; libvirt must know the bitmap as well, with the description
        `about`.
        """

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        """Let QEMU write the disks of this instant to `files`, by target, and make `bitmap`.

        With `since`, the name of a bitmap, only what was written since it was made.
        """

    async def progress(self, uid: str) -> PushState:
        """Return the state of the last backup; `none` if the guest has ended."""

    async def abort(self, uid: str) -> None:
        """End a backup that is being written; no effect without one."""

    async def keep_only(
        self, uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = BITMAP
    ) -> None:
        """Remove all bitmaps of a `prefix` except `bitmaps`; with None, remove only `drop`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The disks that QEMU serves to a reader."""

    id: str
    files: Mapping[str, str]
    """The agent's names of the files for overwritten blocks, by target."""
    exports: Mapping[str, str]
    """The names of the disks, by target."""
    since: str
    """The bitmap of the earlier reading, or empty."""
    bitmap: str
    """The bitmap that is made at this instant."""
    about: str = ""
    """Its description: which volumes the disks are."""


class GuestReadPort(Protocol):
    """Lets the QEMU of a running guest serve its disks. Errors are as those of `Hypervisor`."""

    async def begin(self, uid: str, reading: Reading) -> None:
        """Let QEMU serve the disks of this instant on a socket of QEMU's user."""

    async def served(self, uid: str, reading: str) -> bool:
        """Return True while QEMU serves the disks of that instant, also for an earlier agent."""

    async def end(self, uid: str, reading: str = "", *, off: bool = False) -> bool:
        """End the server of a reading, or any one, and remove its socket. The bitmap stays.

        Return False if it may still run: libvirt does not know the guest, which is not known to be
        `off`.
        """
