"""Derives paths of a VM's disks and images, and checks headers of files.

imaged reports the volumes and their images, but no paths (ADR 0030). The agent's own code reads the
header of each file before libvirt gets its path.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from virtbus.bus.runtime.pool_settings import PoolSettings
from virtbus.nodeagent.core.network_disks import ALL_BYTES, NetworkDisk, device_of, network_disk
from virtbus.schemas.disk_rules import is_drive
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.layer import LAYERS
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.pool import ABILITIES, END_BYTES, LOCAL, ON_DEVICES, PoolKind
from virtbus.schemas.vm import VmRecord, Volume
from virtbus.schemas.volume_ref import VolumeRef

HEAD_BYTES = 64 * 1024
"""The number of bytes to read from a file's start. They have the header and the backing name."""
DISKS, IMAGES, DATA, VOLUMES, POOLS = "disks", "images", "data", "volumes", "pools"
"""Folders: `<state_dir>/disks/<uid>/<volume>.qcow2`, `<state_dir>/images/data/<hex digest>`,
`<state_dir>/disks/volumes/<folder>/disk.qcow2`, and `disks/pools/<pool>/<folder>/disk.qcow2`. The
file of a shared volume is `disk.raw` instead of `disk.qcow2`."""

SHARED_SUFFIX = ".raw"
_NO_POOLS: Mapping[str, PoolSettings] = {}
_DIGITS = 12
"""Digits of an image's digest in the name of a medium."""
_MAGIC = b"QFI\xfb"
_V2 = struct.Struct(">4sIQIIQI")
_V2_BYTES, _V3_BYTES = 72, 104
_FEATURES_AT, _LENGTH_AT = 72, 100
_HARMLESS = 1 | 8 | 16
"""Incompatible features that need no other file: dirty, compression type, extended L2 entries."""
_EXT_END, _EXT_BACKING_FORMAT = 0, 0xE2792ACA
_MAX_NAME_BYTES = 1023


@dataclass(frozen=True, slots=True)
class DiskSource:
    """The source of a disk: a file with its layers and image, a device, or data on a server."""

    path: str
    format: ImageFormat = ImageFormat.QCOW2
    backing_path: str = ""
    backing_format: ImageFormat | None = None
    layers: tuple[str, ...] = ()
    """The paths of the files between the disk and its image, from the top (ADR 0061)."""
    place: tuple[str, ...] = ()
    """The folders below `<state_dir>/disks`, and the file name."""
    pin: str = ""
    """The file name of the agent's own hard link. Each medium of a drive has its own name, so that
    libvirt sees a change.
    """
    volume: bool = False
    """True for a named volume (ADR 0045)."""
    network: NetworkDisk | None = None
    """The address of a disk on a server. The `path` is then empty."""
    device_bytes: int = 0
    """The number of bytes of the device at `path` that the guest sees, or `ALL_BYTES`. It is 0 for
    other disks, and for an unchecked device.
    """
    device: bool = False
    """True if `path` is a device that the spec names. The check of the device sets `device_bytes`.
    """
    reserved_bytes: int = 0
    """The bytes at the end of a spec's device that are hidden from the guest."""
    shared: bool = False
    """True for a raw volume that several guests may write to at once."""
    lent: bool = False
    """True if the agent opens the file at each start, and passes the descriptor to libvirt as
    `path`.
    """

    @property
    def is_file(self) -> bool:
        """True if `path` is a file: a disk that imaged made, or an ISO of the agent."""
        return self.network is None and not (self.device_bytes or self.device or self.lent)


def refused(volume: str, why: str) -> VirtbusError:
    """Return the error for a disk that the agent rejects."""
    message = (
        f"the disk of volume {volume} is refused: {why}; the VM is not started with it. "
        "See imaged's log; delete the VM and create it again, or restore the disk from a backup"
    )
    return VirtbusError(Code.CONFLICT, "disk_refused", message)


def disk_name(volume: str) -> str:
    """Return a disk's file name in the VM's folder."""
    return f"{volume}.qcow2"


def lent_name(volume: str) -> str:
    """Return libvirt's name for the descriptor of an open file."""
    return f"virtbus-{volume}"


def disk_sources(
    state_dir: Path,
    record: VmRecord,
    made: Mapping[str, MadeDisk],
    pools: Mapping[str, PoolSettings] = _NO_POOLS,
) -> dict[str, DiskSource]:
    """Return the sources of all disks by volume name, without ISO volumes.

    Raises:
        VirtbusError: 409 `disk_refused`: imaged omitted a volume or made it too small. Or only one
            of spec and imaged's report has an image. Or the record lacks a reference to a volume.
            409 `pool_unknown`: the settings of the node's pool lack the volume's data or device.
    """
    sources = {}
    disks = record.spec.domain.devices.disks
    drives = {one.name for one in disks if is_drive(one)} - {*record.volume_refs}
    for volume in record.spec.volumes:
        if volume.is_iso:
            continue
        if volume.host_device is not None:
            path, end = volume.host_device.path, END_BYTES * bool(volume.host_device.image)
            source = DiskSource(path, ImageFormat.RAW, device=True, reserved_bytes=end)
            sources[volume.name] = source
            continue
        if volume.host_disk is not None:
            sources[volume.name] = DiskSource(lent_name(volume.name), ImageFormat.RAW, lent=True)
            continue
        disk = made.get(volume.name)
        if disk is None:
            raise refused(volume.name, "imaged did not make it")
        if bool(disk.digest) != bool(record.image_of(volume)) or bool(disk.digest) != bool(
            disk.image_format
        ):
            raise refused(volume.name, "it is not made of the image that the spec names")
        ref = record.volume_refs.get(volume.name)
        if volume.volume is not None and ref is not None and _has_no_file(ref):
            sources[volume.name] = _without_file(record.uid, volume.name, ref, disk, pools)
            continue
        # text, because pathlib's joins would cost 20 us per volume
        image, drive = disk.digest.removeprefix("sha256:"), volume.name in drives
        below = f"{state_dir}/{IMAGES}/{DATA}/{image}" if image else ""
        place = _place(record, volume)
        shared = ref is not None and ref.shared
        pin = disk_name(f"{volume.name}.{image[:_DIGITS]}" if drive and image else volume.name)
        sources[volume.name] = DiskSource(
            path="/".join((str(state_dir), DISKS, *place)),
            format=ImageFormat.RAW if shared else ImageFormat.QCOW2,
            backing_path=below,
            backing_format=disk.image_format,
            layers=tuple(f"{state_dir}/{DISKS}/{LAYERS}/{name}" for name in disk.layers),
            place=place,
            pin=f"{volume.name}{SHARED_SUFFIX}" if shared else pin,
            volume=volume.volume is not None,
            shared=shared,
        )
    return sources


def _has_no_file(ref: VolumeRef) -> bool:
    return ref.kind in ON_DEVICES or ABILITIES[ref.kind].shared


def _without_file(
    vm: str, name: str, ref: VolumeRef, made: MadeDisk, pools: Mapping[str, PoolSettings]
) -> DiskSource:
    source = DiskSource("", ImageFormat.RAW, volume=True, shared=ref.shared)
    if ref.kind not in ON_DEVICES:
        return replace(source, network=network_disk(ref, pools, vm))
    size_bytes = ref.size_bytes
    if ref.kind is PoolKind.LVM:
        if made.virtual_size_bytes < size_bytes:  # the rest may be another volume's data
            raise refused(name, "imaged has not made it as large as its record says")
        size_bytes = ALL_BYTES
    return replace(source, path=device_of(ref, pools), device_bytes=size_bytes)


def _place(record: VmRecord, volume: Volume) -> tuple[str, ...]:
    if volume.volume is None:
        return (record.uid, disk_name(volume.name))
    ref = record.volume_refs.get(volume.name)
    if ref is None:
        raise refused(volume.name, "its record does not say which volume it is")
    return volume_place(ref)


def volume_place(ref: VolumeRef) -> tuple[str, ...]:
    """Return the folders of a volume's disk below `<state_dir>/disks`, and its file name."""
    pool = (VOLUMES,) if ref.pool == LOCAL else (POOLS, ref.pool)
    return (*pool, ref.folder, f"disk{SHARED_SUFFIX}" if ref.shared else disk_name("disk"))


def check_disk(volume: str, head: bytes, source: DiskSource) -> None:
    """Raise `disk_refused` if the disk is no qcow2 file, or its backing file differs from `source`.

    A shared volume's raw file passes unchecked. It has no header, and a guest may write any bytes
    at its start, even a qcow2 header.
    """
    if source.shared:
        return
    check_backing(volume, head, below(source, 0))


def below(source: DiskSource, depth: int) -> tuple[str, str]:
    """Return path and format of the file below the disk (depth 0) or its layer number `depth`.

    Both are empty without such a file.
    """
    if depth < len(source.layers):
        return source.layers[depth], str(ImageFormat.QCOW2)
    return source.backing_path, str(source.backing_format) if source.backing_path else ""


def check_backing(volume: str, head: bytes, wanted: tuple[str, str]) -> None:
    """Raise `disk_refused` if a file is no qcow2 file with the `wanted` backing file.

    `wanted` is path and format. Two empty strings forbid a backing file.
    """
    backing, backing_format = _qcow2(volume, head)
    if backing != wanted[0].encode():
        raise refused(volume, f"its header names the backing file {_shown(backing)}")
    if backing and backing_format != wanted[1].encode():
        raise refused(volume, f"its header says its image is {_shown(backing_format)}")


def check_image(volume: str, head: bytes, image_format: ImageFormat) -> None:
    """Raise `disk_refused` if a qcow2 image needs another file, or has a damaged header."""
    if image_format is ImageFormat.QCOW2 and _qcow2(volume, head)[0]:
        raise refused(volume, "its image has a backing file")


def _qcow2(volume: str, head: bytes) -> tuple[bytes, bytes]:
    """Return name and format of the backing file in a header; both empty without a backing file."""
    if len(head) < _V3_BYTES or head[:4] != _MAGIC:
        raise refused(volume, "it is no qcow2 file")
    _, version, offset, size, cluster_bits, _, crypt = _V2.unpack_from(head)
    features, length = 0, _V2_BYTES
    if version == 3:
        (features,) = struct.unpack_from(">Q", head, _FEATURES_AT)
        (length,) = struct.unpack_from(">I", head, _LENGTH_AT)
    if version not in {2, 3} or not 9 <= cluster_bits <= 21 or crypt:
        raise refused(volume, "its qcow2 header is damaged, or it is encrypted")
    if features & ~_HARMLESS:
        raise refused(volume, f"it needs another file or is damaged (features {features:#x})")
    name = head[offset : offset + size] if offset else b""
    if len(name) != size or size > _MAX_NAME_BYTES:
        raise refused(volume, "its qcow2 header names a backing file that cannot be read")
    return name, _backing_format(head[: offset or len(head)], length) if name else b""


def _backing_format(head: bytes, at: int) -> bytes:
    while at + 8 <= len(head):
        kind, length = struct.unpack_from(">II", head, at)
        if kind in {_EXT_END, _EXT_BACKING_FORMAT}:
            return head[at + 8 : at + 8 + length] if kind else b""
        at += 8 + (length + 7) // 8 * 8
    return b""


def _shown(name: bytes) -> str:
    return ascii(name[:100].decode(errors="backslashreplace"))


def devices_with_images(records: Iterable[VmRecord]) -> frozenset[str]:
    """Return the paths of host devices whose content begins with an image."""
    devices = (volume.host_device for record in records for volume in record.spec.volumes)
    return frozenset(one.path for one in devices if one is not None and one.image)


def held_volumes(records: Iterable[VmRecord]) -> dict[tuple[str, str], str]:
    """Return the VM's name of each held volume, by the volume's pool and folder."""
    return {(ref.pool, ref.folder): vm.name for vm in records for ref in vm.volume_refs.values()}
