"""Derives from a VM's record the disks that imaged makes for the VM."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from virtbus.imaged.core.overlay import Overlay
from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.image import ImageFormat, ImageSource, is_sealed, parse_image_ref, sealed_ref
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.vm import MIB, VmRecord, VmSpec, Volume
from virtbus.schemas.volume_ref import FillSource, VolumeRef

_ROOTS = uuid.UUID("5c0b7c1e-6c1d-4d62-9a39-2f6f5a0c7e11")
"""The UUID namespace of the uids of `device_root_ref`. It must not change, because marks on devices
have these uids."""


@dataclass(frozen=True, slots=True)
class DiskRequest:
    """One disk: empty if `source` is None, as large as its image if `size_bytes` is None."""

    volume: str
    source: ImageSource | None
    size_bytes: int | None
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    query: str = ""
    """The query of the image's URL, if an older controller left it in the record."""
    ref: VolumeRef | None = None
    """The volume whose data the disk has; None if the disk belongs to the VM itself."""
    drive: bool = False
    """True for a CD-ROM drive. Nothing writes to its disk, so another medium may replace it."""


def wanted_disks(record: VmRecord, max_virtual_bytes: int) -> tuple[DiskRequest, ...]:
    """Return the disks that imaged makes for a record's VM, in the order of the spec.

    Raises:
        VirtbusError: 400 `disk_too_large`, with each disk above the node's limit. 409
            `volume_unknown`: the spec has a volume, and the record has no reference to this volume.
    """
    wanted = []
    disks = record.spec.domain.devices.disks
    drives = {disk.name for disk in disks if disk.device == "cdrom"}
    for volume in record.spec.volumes:
        if volume.volume is not None:
            wanted.append(_named(record, volume))
        elif volume.image is not None:
            source, query = _source(record, volume)
            size, policy = volume.image.size, _policy(source)
            drive = volume.name in drives
            wanted.append(DiskRequest(volume.name, source, size, policy, query, drive=drive))
        elif volume.container_disk is not None:
            container = volume.container_disk
            wanted.append(
                DiskRequest(
                    volume.name,
                    parse_image_ref(container.ref),
                    None,
                    container.pull_policy,
                )
            )
        elif volume.empty_disk is not None:
            whole = volume.empty_disk.capacity // MIB * MIB  # as KubeVirt rounds
            wanted.append(DiskRequest(volume.name, None, whole))
    large = tuple(
        Detail(
            path=f"spec.volumes[{disk.volume}]",
            message=f"{format_bytes(disk.size_bytes)} is more than this node allows",
            hint=f"ask for at most {format_bytes(max_virtual_bytes)} (setting max_virtual_bytes)",
        )
        for disk in wanted
        if disk.size_bytes is not None and disk.size_bytes > max_virtual_bytes
    )
    if large:
        raise VirtbusError(
            Code.INVALID,
            "disk_too_large",
            f"{large[0].path}: {large[0].message}; {large[0].hint}",
            details=large,
        )
    return tuple(wanted)


def _named(record: VmRecord, volume: Volume) -> DiskRequest:
    ref = record.volume_refs.get(volume.name)
    if ref is None:
        message = f"the record of {record.name} does not say which volume {volume.name} is"
        raise VirtbusError(Code.CONFLICT, "volume_unknown", message)
    if not ref.image:
        return DiskRequest(volume.name, None, ref.size_bytes, ref=ref)
    source, _ = _source(record, volume)
    policy = _policy(source)
    return DiskRequest(volume.name, source, ref.size_bytes, policy, ref=ref)


def _source(record: VmRecord, volume: Volume) -> tuple[ImageSource, str]:
    """Return the volume's image, and the query of the image's URL."""
    ref, query = sealed_ref(record.image_of(volume))
    return parse_image_ref(ref)._replace(target=record.target_of(volume)), query


def device_roots(record: VmRecord) -> tuple[tuple[str, ImageSource], ...]:
    """Return the path and the image of each host device whose first content is an image."""
    devices = ((one, one.host_device) for one in record.spec.volumes)
    return tuple(
        (device.path, _source(record, volume)[0])
        for volume, device in devices
        if device is not None and device.image
    )


def device_root_ref(digest: str) -> VolumeRef:
    """Return the reference in the marks of a device whose first content is the image `digest`.

    The device has no volume. The reference is the same for each VM that gets this image on a
    device.
    """
    return VolumeRef(
        uid=str(uuid.uuid5(_ROOTS, digest)),
        namespace="device-root",
        name="root",
        size_bytes=0,
        image=digest,
        kind=PoolKind.BLOCK,
    )


def _policy(source: ImageSource) -> ImagePullPolicy:
    """Return the pull policy of an image name of the bus; other names have IfNotPresent."""
    return source.target.pull_policy if source.target else ImagePullPolicy.IF_NOT_PRESENT


def refs_of(record: VmRecord) -> frozenset[str]:
    """Return the references of all images of a record, as the store names them."""
    imaged = (volume for volume in record.spec.volumes if record.image_of(volume))
    return frozenset(_source(record, volume)[0].name for volume in imaged)


def brings_secret(spec: VmSpec) -> bool:
    """Return True if a pull for the VM needs the VM's secret: a login or a URL query."""
    return any(_needs_secret(volume) for volume in spec.volumes)


def _needs_secret(volume: Volume) -> bool:
    disk = volume.container_disk
    if disk is not None:
        return disk.image_pull_secret is not None
    return volume.image is not None and is_sealed(volume.image.ref)


def image_of_fill(source: FillSource) -> tuple[ImageSource, ImagePullPolicy]:
    """Return the image that a volume is filled with, and its pull policy."""
    image = parse_image_ref(source.image)._replace(target=source.target)
    return image, _policy(image)


def fill_size(ref: VolumeRef, source_bytes: int, max_virtual_bytes: int) -> int:
    """Return the size of the disk that a volume is filled with.

    Raises:
        VirtbusError: 400 `disk_too_small`: the size is less than the source's. 400
            `disk_too_large`: the size is more than this node allows.
    """
    size_bytes = ref.size_bytes or source_bytes
    if size_bytes < source_bytes:
        message = (
            f"the volume {ref.name} has {format_bytes(size_bytes)}, and its source "
            f"{format_bytes(source_bytes)}; delete the volume, and create it with at "
            "least that size or without a size"
        )
        raise VirtbusError(Code.INVALID, "disk_too_small", message)
    if size_bytes > max_virtual_bytes:
        message = (
            f"the volume {ref.name} would have {format_bytes(size_bytes)}; this node allows "
            f"{format_bytes(max_virtual_bytes)} (setting max_virtual_bytes)"
        )
        raise VirtbusError(Code.INVALID, "disk_too_large", message)
    return size_bytes


def refuse_unfilled(ref: VolumeRef) -> None:
    """Raise 503 `volume_not_filled` for a missing disk that only an operation makes."""
    if ref.copied:
        message = (
            f"the volume {ref.name} has no content yet; `virtbus volume get {ref.name} -n "
            f"{ref.namespace}` shows the progress of its copy"
        )
        raise VirtbusError(Code.UNAVAILABLE, "volume_not_filled", message, after_ms=2000)


def other_medium(disk: DiskRequest, found: Overlay, may_be: Callable[[str, str], bool]) -> bool:
    """Return True if a CD-ROM drive has a medium that is not the pinned image of its volume.

    `may_be(pin, digest)` returns True if the pin may mean the file with this digest.
    """
    pin = disk.source.file_digest if disk.source is not None else None
    if not disk.drive or pin is None:
        return False
    return not may_be(pin, f"sha256:{found.backing_path.rpartition('/')[2]}")


def overlay_size(disk: DiskRequest, image_virtual_bytes: int) -> int:
    """Return the size of a new overlay: the requested size, otherwise the image's size.

    Raises:
        VirtbusError: 400 `disk_too_small`: an overlay cannot truncate the image.
    """
    if disk.size_bytes is None:
        return image_virtual_bytes
    if disk.size_bytes < image_virtual_bytes:
        raise VirtbusError(
            Code.INVALID,
            "disk_too_small",
            f"volume {disk.volume}: {format_bytes(disk.size_bytes)} is smaller than its image, "
            f"which has {format_bytes(image_virtual_bytes)}; ask for at least that, or leave "
            "the size out",
        )
    return disk.size_bytes


def stale(epoch: int, newest: int) -> VirtbusError:
    """Return the error 409 for a request of an earlier assignment of the VM."""
    message = (
        f"epoch {epoch} is older than {newest}, which this node works for; read the record again"
    )
    return VirtbusError(Code.CONFLICT, "stale_epoch", message)


def released(message: str) -> VirtbusError:
    """Return the error 409 for a request to make a disk that was released."""
    return VirtbusError(Code.CONFLICT, "released", message)


def mismatch(volume: str, why: str) -> VirtbusError:
    """Return the error 409 for an existing disk that differs from the request."""
    message = (
        f"the disk of volume {volume} exists and is not what the spec asks for: {why}; "
        "it is left as it is: restore the former spec, or delete the VM and create it again"
    )
    return VirtbusError(Code.CONFLICT, "disk_mismatch", message)


def made_disk(
    found: Overlay, digest: str, image_format: str, layers: tuple[str, ...] = ()
) -> MadeDisk:
    """Return the report of a disk that rests on `layers` and on the image `digest`, if any."""
    return MadeDisk(
        virtual_size_bytes=found.virtual_size_bytes,
        digest=digest,
        image_format=ImageFormat(image_format) if digest else None,
        layers=layers,
    )
