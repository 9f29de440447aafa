"""Gives mounted disks a serial number, by which their guest finds them (`/dev/disk/by-id`)."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.schemas.errors import Detail

SERIAL_CHARACTERS = 20
"""virtio and SATA cut longer ones without an error."""
SEEDS = ("cloud_init_no_cloud", "cloud_init_config_drive")
Raw = Mapping[str, Any]


def mount_problems(volumes: Sequence[Raw], disks: Sequence[Raw]) -> list[Detail]:
    """Return the mounts of raw volumes that their guest would not find."""
    found = []
    if not (mounts := _mounts(volumes)):
        return []
    names = [str(volume.get("name")) for volume in volumes]
    serials = {str(disk.get("name")): disk.get("serial") for disk in disks}
    mounted = {mount.get("volume") for _, mount in mounts if isinstance(mount.get("volume"), str)}
    held = {name: serials.get(name) or serial_of(name) for name in names if name in mounted}
    held |= {name: serial for name, serial in serials.items() if isinstance(serial, str)}
    for path, mount in mounts:
        name = mount.get("volume")
        if not isinstance(name, str):
            continue  # its type is reported already
        if name not in names:
            why = f"no volume is named {name!r:.80}"
        else:
            others = [serial for other, serial in held.items() if other != name]
            why = _ambiguity(str(held[name]), others, mount.get("partition") or 1)
        if why:
            found.append(Detail(path=f"{path}.volume", message=why))
    return found


def _ambiguity(serial: str, others: Sequence[Any], partition: Any) -> str:
    """Return why cloud-init would not find the disk by its serial number; empty if it would."""
    if "." in serial:
        return (
            f"its disk's serial number {serial:.40} has a dot: cloud-init reads a partition in it"
        )
    # cloud-init tries these suffixes for a partition, also for the first one of a whole disk
    for suffix in ("", f"{partition}", f"p{partition}"):
        if serial + suffix in others:
            what = f"{serial}{suffix}"
            return (
                f"another disk has the serial number {what:.40}; give this one a serial of its own"
            )
    return ""


def add_serials(volumes: Sequence[Raw], disks: Sequence[dict[str, Any]]) -> None:
    """Give each mounted disk without a serial number one that is a function of its name."""
    mounted = {mount["volume"] for _, mount in _mounts(volumes)}
    for disk in disks if mounted else ():
        if disk["name"] in mounted and disk.get("serial") is None:
            disk["serial"] = serial_of(disk["name"])


def serial_of(name: str) -> str:
    """Return the serial number of a disk that has none of its own."""
    if len(name) <= SERIAL_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    return f"{name[: SERIAL_CHARACTERS - 9]}-{digest}"


def _mounts(volumes: Sequence[Raw]) -> list[tuple[str, Raw]]:
    """Return each mount of each seed, with its path in the request."""
    found = []
    for index, volume in enumerate(volumes):
        for kind in SEEDS:
            seed = volume.get(kind)
            mounts = seed.get("mounts") if isinstance(seed, Mapping) else None
            for number, mount in enumerate(mounts if isinstance(mounts, list | tuple) else ()):
                if isinstance(mount, Mapping):
                    found.append((f"spec.volumes[{index}].{kind}.mounts[{number}]", mount))
    return found
