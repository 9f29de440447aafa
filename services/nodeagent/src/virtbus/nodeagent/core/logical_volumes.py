"""Names LVM's logical volumes, builds LVM's commands, and reads LVM's reports.

A logical volume of virtbus has the tag `virtbus`, and `virtbus.volume=POOL/FOLDER` with the name of
its volume (ADR 0088). Once its content is complete, it also has `virtbus.filled=BYTES/OPERATION`.
LVM writes all tags of one command at once, so a crash leaves all of them or none.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from virtbus.bus.runtime.pool_settings import LvmPool
from virtbus.schemas.pool import PoolReport, PoolState
from virtbus.schemas.quantity import format_bytes

Row = TypeVar("Row")
OURS = "virtbus"
_VOLUME, _FILLED = "virtbus.volume=", "virtbus.filled="
_JSON = "--reportformat", "json", "--units", "b", "--nosuffix"
_LV_FIELDS = "lv_name,lv_size,lv_tags,pool_lv,data_percent"
_VG_FIELDS = "vg_size,vg_free"


@dataclass(frozen=True, slots=True)
class LogicalVolume:
    """A row of `lvs`."""

    name: str
    size_bytes: int
    tags: tuple[str, ...] = ()
    thin_pool: str = ""
    used_ratio: float = 0.0
    """The used share of a thin pool, from 0 to 1."""

    @property
    def volume(self) -> str:
        """`pool/folder` of the volume; empty for a foreign logical volume."""
        return _after(self.tags, _VOLUME) if OURS in self.tags else ""

    @property
    def filled(self) -> tuple[int, str]:
        """The bytes of complete content, or 0, and the operation that wrote them."""
        size, _, operation = _after(self.tags, _FILLED).partition("/")
        return (int(size) if size.isdecimal() else 0), operation


def _after(tags: Sequence[str], prefix: str) -> str:
    return next((tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)), "")


LogicalVolumes = Sequence[LogicalVolume]


def of_pool(volumes: LogicalVolumes, name: str) -> Iterator[tuple[str, LogicalVolume]]:
    """Yield folder and logical volume of each volume in a pool."""
    for one in volumes:
        pool, _, folder = one.volume.partition("/")
        if pool == name and folder:
            yield folder, one


def find(volumes: LogicalVolumes, volume: str) -> LogicalVolume | None:
    """Return the logical volume of `pool/folder`, or None.

    Raises:
        ValueError: a logical volume has only the name or only the tag.
    """
    name = lv_name(volume)
    found = [one for one in volumes if one.name == name or one.volume == volume]
    for one in found:
        if one.name != name or one.volume != volume:
            msg = f"the logical volume {one.name} lacks the name or the tag of {volume}"
            raise ValueError(msg)
    return found[0] if found else None


def lv_name(volume: str) -> str:
    """Return the name of the logical volume of `pool/folder`.

    The name is a hash, because LVM limits the length of names and reserves some words. The tag has
    the full name.
    """
    return f"{OURS}-{hashlib.sha256(volume.encode()).hexdigest()[:32]}"


def device_path(pool: LvmPool, volume: str, devices: str = "/dev") -> str:
    """Return the path of the device of `pool/folder`."""
    return f"{devices}/{pool.group}/{lv_name(volume)}"


# --- commands -------------------------------------------------------------------------------
def list_group(pool: LvmPool) -> list[str]:
    """Return the command that shows the size and the free bytes of the volume group."""
    return ["vgs", *_JSON, "-o", _VG_FIELDS, pool.group]


def list_volumes(pool: LvmPool) -> list[str]:
    """Return the command that lists the logical volumes of the volume group."""
    return ["lvs", *_JSON, "-o", _LV_FIELDS, pool.group]


def make(pool: LvmPool, volume: str, size_bytes: int) -> list[str]:
    """Return the command that makes a logical volume with its tags."""
    tags = ("--addtag", OURS, "--addtag", _VOLUME + volume)
    name = ("--name", lv_name(volume))
    if pool.thin_pool:
        size = ("--virtualsize", _sectors(size_bytes), "--thinpool", pool.thin_pool)
        return ["lvcreate", "--yes", *name, *tags, *size, pool.group]
    # an earlier file system in the extents may have left its signature
    old = ("--zero", "y", "--wipesignatures", "y")
    return ["lvcreate", "--yes", *name, *tags, *old, "--size", _sectors(size_bytes), pool.group]


def grow(pool: LvmPool, volume: str, size_bytes: int) -> list[str]:
    """Return the command that makes a logical volume larger."""
    return ["lvextend", "--size", _sectors(size_bytes), _path(pool, volume)]


def activate(pool: LvmPool, volume: str) -> list[str]:
    """Return the command that makes the device of a logical volume."""
    return ["lvchange", "--activate", "y", _path(pool, volume)]


def mark(
    pool: LvmPool, volume: str, there: LogicalVolume, filled_bytes: int = 0, operation: str = ""
) -> list[str]:
    """Return the command that sets the tag `virtbus.filled`, or removes the tag for 0 bytes.

    The command is empty if the tags are right.
    """
    wanted = {f"{_FILLED}{filled_bytes}/{operation}"} if filled_bytes else set[str]()
    found = {tag for tag in there.tags if tag.startswith(_FILLED)}
    changes = [("--addtag", tag) for tag in sorted(wanted - found)]
    changes += [("--deltag", tag) for tag in sorted(found - wanted)]
    if not changes:
        return []
    return ["lvchange", *(word for change in changes for word in change), _path(pool, volume)]


def remove(pool: LvmPool, volume: str) -> list[str]:
    """Return the command that removes a logical volume with both the name and the tag."""
    which = f'lv_name="{lv_name(volume)}" && lv_tags="{_VOLUME}{volume}"'
    return ["lvremove", "--yes", "--select", which, pool.group]


def _path(pool: LvmPool, volume: str) -> str:
    return f"{pool.group}/{lv_name(volume)}"


def _sectors(size_bytes: int) -> str:
    """Round up to whole sectors. LVM itself rounds up to whole extents."""
    return f"{-(-size_bytes // 512) * 512}b"


# --- reports --------------------------------------------------------------------------------
def room_of(vgs: str) -> tuple[int, int]:
    """Return size and free bytes of a group. Raises ValueError."""

    def room(row: Mapping[str, str]) -> tuple[int, int]:
        return int(row["vg_size"]), int(row["vg_free"])

    (found,) = _rows(vgs, "vg", room) or [(0, 0)]
    return found


def volumes_of(lvs: str) -> list[LogicalVolume]:
    """Return the logical volumes of a group. Raises ValueError."""

    def volume(row: Mapping[str, str]) -> LogicalVolume:
        tags = tuple(tag for tag in row["lv_tags"].split(",") if tag)
        used = float(row["data_percent"] or 0) / 100
        return LogicalVolume(row["lv_name"], int(row["lv_size"]), tags, row["pool_lv"], used)

    return _rows(lvs, "lv", volume)


def _rows(report: str, kind: str, read: Callable[[Mapping[str, str]], Row]) -> list[Row]:
    try:
        return [read(row) for row in json.loads(report)["report"][0][kind]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        msg = f"the report of LVM cannot be read: {type(error).__name__}"
        raise ValueError(msg) from error


def report_of(
    name: str, pool: LvmPool, room: tuple[int, int], volumes: LogicalVolumes
) -> PoolReport:
    """Return the report of a pool.

    Without a thin pool, all used space of the volume group counts as allocated, including foreign
    logical volumes.
    """
    report = PoolReport(
        name=name,
        kind=pool.kind,
        state=PoolState.READY,
        reserve_bytes=pool.reserve,
        volumes=sum(1 for _ in of_pool(volumes, name)),
        **(_thin_room(pool, volumes) if pool.thin_pool else _room(*room)),
    )
    if report.size_bytes and report.free_bytes > report.reserve_bytes:
        return report
    why = (
        f"{format_bytes(report.free_bytes)} are free, and it keeps "
        f"{format_bytes(report.reserve_bytes)} (reserve); delete volumes, or enlarge the group"
    )
    update = {"state": PoolState.FULL, "message": why}
    if not report.size_bytes:
        why = f"the volume group {pool.group} has no thin pool {pool.thin_pool}"
        update = {"state": PoolState.GONE, "message": why}
    return report.model_copy(update=update)


def _room(size_bytes: int, free_bytes: int) -> dict[str, Any]:
    return {
        "size_bytes": size_bytes,
        "free_bytes": free_bytes,
        "allocated_bytes": size_bytes - free_bytes,
        "overcommit": 1.0,
    }


def _thin_room(pool: LvmPool, volumes: LogicalVolumes) -> dict[str, Any]:
    name = pool.thin_pool or ""
    there = next((one for one in volumes if one.name == name), LogicalVolume(name, 0))
    return {
        "size_bytes": there.size_bytes,
        "free_bytes": int(there.size_bytes * max(0.0, 1 - there.used_ratio)),
        "allocated_bytes": sum(one.size_bytes for one in volumes if one.thin_pool == name),
        "overcommit": pool.overcommit,
    }


def why_no_room(report: PoolReport, more_bytes: int, *, thin: bool) -> str:
    """Return the reason for which a pool refuses `more_bytes` of new data, or an empty string."""
    why = report.refusal(more_bytes)
    if not why and not thin and report.free_bytes - more_bytes < report.reserve_bytes:
        why = (
            f"has {format_bytes(report.free_bytes)} free and keeps "
            f"{format_bytes(report.reserve_bytes)} (reserve); {format_bytes(more_bytes)} more do "
            "not fit"
        )
    return f"the pool {report.name} {why}" if why else ""
