"""Finds the paths that a VM uses on its node: directories and files with disks (ADR 0076)."""

from collections.abc import Iterator
from typing import NamedTuple

from virtbus.schemas.filesystem import FILESYSTEMS
from virtbus.schemas.vm import VmSpec, Volume


class PathUse(NamedTuple):
    """A path of the node, and the field of the spec with the path.

    `written` is True if the guest can write there.
    """

    field: str
    path: str
    written: bool


def host_paths(spec: VmSpec) -> Iterator[PathUse]:
    """Yield the node's directories that a VM mounts, and the node's files that are its disks."""
    for index, one in enumerate(spec.domain.devices.filesystems):
        yield PathUse(f"{FILESYSTEMS}[{index}].directory", one.directory, not one.readonly)
    for index, volume in enumerate(spec.volumes):
        if volume.host_disk is not None:
            yield PathUse(f"spec.volumes[{index}].host_disk.path", volume.host_disk.path, True)


def of_host(volume: Volume) -> bool:
    """Return True for a device or a file of the node, which virtbus neither copies nor removes."""
    return volume.host_device is not None or volume.host_disk is not None
