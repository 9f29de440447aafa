"""Describes the backups that the QEMU of a running guest writes, and the port that begins them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol
from xml.etree import ElementTree as ET


@dataclass(frozen=True, slots=True)
class PushState:
    """The state of the files that QEMU writes. `done` is known only to the libvirtd that began."""

    state: Literal["none", "running", "done", "failed"] = "none"
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


def checkpoint_xml(xml: str, targets: Collection[str], bitmap: str) -> str:
    """Return libvirt's request to make a bitmap in the disks `targets` at the same instant."""
    request = ET.Element("domaincheckpoint")
    ET.SubElement(request, "name").text = bitmap
    disks = ET.SubElement(request, "disks")
    for name in _targets(xml):
        if name in targets:
            ET.SubElement(disks, "disk", name=name, checkpoint="bitmap", bitmap=bitmap)
        else:
            ET.SubElement(disks, "disk", name=name, checkpoint="no")
    return ET.tostring(request, encoding="unicode")


def _targets(xml: str) -> list[str]:
    found = ET.fromstring(xml).iterfind("devices/disk/target")  # noqa: S314  from libvirtd
    return [target.get("dev", "") for target in found]


class GuestBackupPort(Protocol):
    """Lets the QEMU of a running guest write backups. Errors are as those of `Hypervisor`."""

    async def bitmaps(self, uid: str, targets: Collection[str]) -> frozenset[str]:
        """Return our bitmaps from which libvirt can write an increment of all disks `targets`.

        QEMU's own answer counts; libvirt must know the bitmap as well.
        """

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        """Let QEMU write the disks of this instant to `files`, by target, and make `bitmap`.

        With `since`, the name of a bitmap, only what was written since it was made.
        """

    async def progress(self, uid: str) -> PushState:
        """Return the state of the last backup; `none` if the guest has ended."""

    async def abort(self, uid: str) -> None:
        """End a backup that is being written; no effect without one."""

    async def keep_only(self, uid: str, bitmaps: Collection[str] | None, drop: str = "") -> None:
        """Remove all our bitmaps except `bitmaps`; with None, remove only `drop`."""
