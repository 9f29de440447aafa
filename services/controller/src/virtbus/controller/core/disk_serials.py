"""Checks that a guest finds its mounted and linked disks by their serials (`/dev/disk/by-id`).

Guests mount directories by virtiofs tags instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from virtbus.schemas.disk import serial_of
from virtbus.schemas.errors import Detail
from virtbus.schemas.guest_files import AUTO

SEEDS = ("cloud_init_no_cloud", "cloud_init_config_drive")
Raw = Mapping[str, Any]


def mount_problems(
    volumes: Sequence[Raw], disks: Sequence[Raw], tags: Sequence[Any] = ()
) -> list[Detail]:
    """Return the problems of mounts and links.

    A guest must be able to find each disk. A file system can be made on an empty disk only. A
    directory must have no properties of disks. `tags` are the names of the directories, which
    guests mount by virtiofs.
    """
    if not (mounts := _mounts(volumes)):
        return []
    found = [one for place in mounts if place[1].get("volume") in tags for one in _shared(*place)]
    names = [str(volume.get("name")) for volume in volumes]
    given = {str(disk.get("name")): disk.get("serial") for disk in disks}
    empty = {str(one.get("name")) for one in volumes if one.get("empty_disk") is not None}
    held = {name: str(given.get(name) or serial_of(name)) for name in (*names, *given)}
    for path, mount in mounts:
        name = mount.get("volume")
        if not isinstance(name, str) or name in tags:
            continue  # pydantic reports a wrong type, and `_shared` the problems of directories
        if name not in names:
            why = f"no volume is named {name!r:.80}"
        else:
            others = [serial for other, serial in held.items() if other != name]
            why = _ambiguity(held[name], others, mount.get("partition") or 1)
        if why:
            found.append(Detail(path=f"{path}.volume", message=why))
        elif mount.get("make_filesystem") is True and name not in empty:
            message = "only an empty_disk gets a file system, because other volumes may have data"
            found.append(Detail(path=f"{path}.make_filesystem", message=message))
        elif mount.get("make_filesystem") is True and not _can_be_made(mount):
            message = "needs a filesystem by name, for example ext4, and no partition"
            found.append(Detail(path=f"{path}.make_filesystem", message=message))
    return found


def _shared(path: str, mount: Raw) -> Iterator[Detail]:
    """Yield the properties of a mount or link that do not apply to a directory."""
    if ".links[" in path:
        yield Detail(path=f"{path}.volume", message="a directory has no device to link to")
    for name in ("partition", "make_filesystem", "filesystem"):
        if mount.get(name):
            message = "is for disks; a directory is mounted as it is"
            yield Detail(path=f"{path}.{name}", message=message)


def _can_be_made(mount: Raw) -> bool:
    return mount.get("filesystem", AUTO) != AUTO and mount.get("partition") is None


def _ambiguity(serial: str, others: Sequence[Any], partition: Any) -> str:
    """Return why cloud-init may find another disk than the one with `serial`; empty if not."""
    if "." in serial:
        return (
            f"its disk's serial number {serial:.40} has a dot: cloud-init reads a partition in it"
        )
    # cloud-init tries these suffixes for a partition, and those of partition 1 for a whole disk
    for suffix in ("", f"{partition}", f"p{partition}"):
        if serial + suffix in others:
            what = f"{serial}{suffix}"
            return (
                f"another disk has the serial number {what:.40}; give this one a serial of its own"
            )
    return ""


def _mounts(volumes: Sequence[Raw]) -> list[tuple[str, Raw]]:
    """Return each mount and link of each seed, with its path in the request."""
    found = []
    for index, volume in enumerate(volumes):
        for kind in SEEDS:
            seed = volume.get(kind)
            for name in ("mounts", "links"):
                given = seed.get(name) if isinstance(seed, Mapping) else None
                for number, one in enumerate(given if isinstance(given, list | tuple) else ()):
                    if isinstance(one, Mapping):
                        found.append((f"spec.volumes[{index}].{kind}.{name}[{number}]", one))
    return found
