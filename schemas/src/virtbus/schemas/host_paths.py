"""Finds the paths that a VM uses on its node: directories and files with disks (ADR 0076)."""

from collections.abc import Iterator
from typing import NamedTuple

from virtbus.schemas.filesystem import FILESYSTEMS
from virtbus.schemas.vm import VmSpec, Volume


class PathUse(NamedTuple):
    """A path of the node in a spec, and the field that has it."""

    field: str
    path: str
    written: bool


def host_paths(spec: VmSpec) -> Iterator[PathUse]:
    """Yield the directories and the files with disks of a VM."""
    for index, one in enumerate(spec.domain.devices.filesystems):
        yield PathUse(f"{FILESYSTEMS}[{index}].directory", one.directory, not one.readonly)
    for index, volume in enumerate(spec.volumes):
        if volume.host_disk is not None:
            yield PathUse(f"spec.volumes[{index}].host_disk.path", volume.host_disk.path, True)


def of_host(volume: Volume) -> bool:
    """Return True for a device or a file of the node, which virtbus neither copies nor removes."""
    return volume.host_device is not None or volume.host_disk is not None
