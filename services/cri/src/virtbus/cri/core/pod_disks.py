"""Decides which volumes of a pod become disks of its VM, with their sizes and mounts.

The VM exists as long as the pod. So the disks outlive a restart of the pod's container.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from virtbus.cri.core import pod_volumes
from virtbus.cri.core.configs import ContainerConfig, Device, Mount
from virtbus.schemas.errors import Detail
from virtbus.schemas.guest_files import GuestLink, GuestMount
from virtbus.schemas.quantity import parse_bytes
from virtbus.schemas.vm import DISK_MAX, DISK_MIN, EmptyDisk, Volume
from virtbus.schemas.volume_ref import HostDevice, NamedVolume
from virtbus.schemas.volume_spec import Retention, VolumeSpec
from virtbus.schemas.wire import reason_of

SIZES = "virtbus.io/empty-dir-sizes"
"""The annotation with the sizes of emptyDirs, such as `cache=5Gi,tmp=1Gi`. CRI's requests do not
have the `sizeLimit` of an emptyDir."""
FILE_SYSTEM = "ext4"
QCOW2_BYTES = 1024**3
"""The size of a flexvolume without the option `capacity`, which is Virtlet's default."""
_CAPACITY = re.compile(r"\s*([0-9]{1,15})\s*([A-Za-z]*)\s*")
_LIBVIRT_UNITS: dict[str, int] = {
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    **{
        form: base**power
        for power, letter in enumerate("kmgtpe", start=1)
        for form, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
    },
}
"""By unit of a capacity, in lower case: the number of bytes, as in libvirt's storage volumes. The
unit of a bare number is `M`."""
_NAME_CHARS = 50


class PodDisk(NamedTuple):
    """A disk of the VM, and its mounts in the guest.

    The disk is a new empty disk, a block device of the node, or a volume on a storage server.
    """

    name: str
    size_bytes: int = 0
    device: str = ""
    mounts: tuple[GuestMount, ...] = ()
    links: tuple[GuestLink, ...] = ()
    readonly: bool = False
    assigned: tuple[str, str] | None = None
    """The pool and the name of a volume on a storage server; None for other disks."""

    @property
    def volume(self) -> Volume:
        """Return the volume of the VM's spec.

        For a volume on a storage server, only the record is deleted with the VM. The server keeps
        the data, and decides the size.
        """
        if self.assigned:
            pool, volume = self.assigned
            spec = VolumeSpec(size=self.size_bytes, pool=pool, retention=Retention.DELETE)
            return Volume(name=self.name, volume=NamedVolume(name=volume, template=spec))
        if self.device:
            return Volume(name=self.name, host_device=HostDevice(path=self.device))
        return Volume(name=self.name, empty_disk=EmptyDisk(capacity=self.size_bytes))


def disks(
    config: ContainerConfig, notes: Mapping[str, str], default_bytes: int
) -> tuple[PodDisk, ...]:
    """Return the disks of a pod with this container, one disk for each volume.

    `notes` has the pod's annotations.
    """
    wished = sizes(notes)[0]
    found: dict[str, PodDisk] = {}
    for mount in filter(pod_volumes.is_disk, config.mounts):
        volume = pod_volumes.volume_name(mount)
        name = disk_name(volume)
        size_bytes = wished.get(volume, default_bytes)
        if mount.options is not None:
            size_bytes = capacity_bytes(mount.options.get("capacity", ""))
        fresh = PodDisk(name, size_bytes, mount.block_path, assigned=mount.assigned)
        known = found.get(name, fresh)
        found[name] = known._replace(mounts=(*known.mounts, _mount(name, mount)))
    more = (one for one in config.devices if one.container_path != pod_volumes.ROOT_PATH)
    return (*found.values(), *map(_device, more))


def root_device(config: ContainerConfig) -> str:
    """Return the block device that is the root disk; empty if the root disk is a new disk."""
    roots = (one for one in config.devices if one.container_path == pod_volumes.ROOT_PATH)
    return next((one.block_path for one in roots), "")


def _device(device: Device) -> PodDisk:
    """Return the disk of a block volume. In the guest, the devicePath is a link to the disk."""
    name = disk_name("device-" + device.container_path.removeprefix("/dev/").strip("/"))
    return PodDisk(
        name,
        device=device.block_path,
        links=(GuestLink(volume=name, path=device.container_path),),
        readonly="w" not in device.permissions,
    )


def _mount(disk: str, mount: Mount) -> GuestMount:
    options = "defaults,nofail,ro" if mount.readonly else "defaults,nofail"
    if mount.block_path or mount.assigned:
        path, part = mount.container_path, (mount.options or {}).get("part", "")
        return GuestMount(volume=disk, path=path, options=options, partition=partition(part))
    return GuestMount(
        volume=disk,
        path=mount.container_path,
        filesystem=FILE_SYSTEM,
        options=options,
        make_filesystem=True,
    )


def partition(text: str) -> int | None:
    """Return the partition of a flexvolume's option `part`, by Virtlet's rules.

    None means the whole disk.

    Raises:
        ValueError: the option is no number.
    """
    if not re.fullmatch(r"-1|[0-9]{1,3}|", text):
        msg = f"the option part is {text!r:.40}; write 0 for the whole disk, or a partition"
        raise ValueError(msg)
    return int(text) or None if text not in {"", "-1"} else 1


def disk_name(volume: str) -> str:
    """Return the name of a volume's disk.

    The name is also the disk's serial. The last character is a letter, because cloud-init reads a
    digit at the end of a serial as the number of a partition.
    """
    plain = re.sub(r"[^a-z0-9-]", "-", volume.lower()).strip("-") or "volume"
    if plain != volume or len(volume) > _NAME_CHARS:
        digest = hashlib.sha256(volume.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        plain = f"{plain[: _NAME_CHARS - 9].strip('-')}-{digest}"
    return f"{plain}-disk"


def sizes(notes: Mapping[str, str]) -> tuple[dict[str, int], list[Detail]]:
    """Return the sizes in the pod's annotation by name of an emptyDir, and the problems."""
    found: dict[str, int] = {}
    wrong: list[Detail] = []
    for part in filter(None, map(str.strip, notes.get(SIZES, "").split(","))):
        name, _, text = part.partition("=")
        try:
            size_bytes = parse_bytes(text.strip())
            _check_size(size_bytes)
        except ValueError as error:
            message = f"{SIZES} has {part!r:.80}: {error}; write name=5Gi, with commas between"
            wrong.append(Detail(path=f"annotations.{SIZES}", message=message))
        else:
            found[name.strip()] = size_bytes
    return found, wrong


def _check_size(size_bytes: int) -> None:
    if not DISK_MIN <= size_bytes <= DISK_MAX:
        msg = f"a disk has between {DISK_MIN} and {DISK_MAX} bytes"
        raise ValueError(msg)


def capacity_bytes(text: str) -> int:
    """Return the capacity of a flexvolume in bytes, by Virtlet's rules.

    Raises ValueError.
    """
    if not text:
        return QCOW2_BYTES
    found = _CAPACITY.fullmatch(text)
    factor = _LIBVIRT_UNITS.get(found[2].lower() or "m") if found else None
    if found is None or factor is None:
        msg = f"the capacity {text!r:.40} is no number with a unit; write for example 1024MiB"
        raise ValueError(msg)
    size_bytes: int = int(found[1]) * factor
    _check_size(size_bytes)
    return size_bytes


def problems(config: ContainerConfig) -> Iterator[Detail]:
    """Yield the problems of the volumes and devices that are to become disks."""
    for index, mount in enumerate(config.mounts):
        if not pod_volumes.is_disk(mount):
            continue
        try:
            _mount("disk", mount)
            if mount.options is not None:
                capacity_bytes(mount.options.get("capacity", ""))
        except ValueError as error:
            message = (
                f"the volume at {mount.container_path!r:.200} cannot be a disk: {reason_of(error)}"
            )
            yield Detail(path=f"mounts[{index}]", message=message)
    for index, device in enumerate(config.devices):
        try:
            _ = _device(device).volume if device.block_path else None
        except ValueError as error:
            message = f"the device at {device.container_path!r:.200}: {reason_of(error)}"
            yield Detail(path=f"devices[{index}]", message=message)
