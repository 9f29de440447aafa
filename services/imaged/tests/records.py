"""Records of VMs as the controller writes them."""

from virtbus.schemas.ids import check_uid
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.vm import EmptyDisk, ImageVolume, VmRecord, VmSpec, Volume
from virtbus.schemas.volume_ref import NamedVolume, VolumeRef

NODE = "n1"
UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


def uid(number: int) -> str:
    return check_uid(f"0192f0c1-2d3e-7abc-8def-{number:012x}")


def volume(ref: str, size: int | None = None, name: str = "root") -> Volume:
    return Volume(name=name, image=ImageVolume(ref=ref, size=size))


def empty(capacity: int, name: str = "data") -> Volume:
    return Volume(name=name, empty_disk=EmptyDisk(capacity=capacity))


def named(name: str = "data", of: str = "data-1") -> Volume:
    return Volume(name=name, volume=NamedVolume(name=of))


def ref(size_bytes: int, image: str = "", name: str = "data-1") -> VolumeRef:
    return VolumeRef(
        uid=uid(77), namespace="default", name=name, size_bytes=size_bytes, image=image
    )


def record(
    *volumes: Volume,
    uid: str = UID,
    epoch: int = 1,
    generation: int = 1,
    deleting: bool = False,
    refs: dict[str, VolumeRef] | None = None,
    targets: dict[str, ImageTarget] | None = None,
) -> VmRecord:
    return VmRecord(
        uid=uid,
        namespace="default",
        name="web",
        spec=VmSpec(volumes=volumes),
        spec_hash="",
        node=NODE,
        epoch=epoch,
        generation=generation,
        created_ns=1,
        deleting=deleting,
        volume_refs=refs or {},
        image_targets=targets or {},
    )
