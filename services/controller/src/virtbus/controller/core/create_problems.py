"""Finds problems between the fields of a create request.

The functions read the raw request, so that one answer has their problems and pydantic's. They skip
values of a wrong type, because pydantic reports these values.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from virtbus.controller.core.disk_serials import SEEDS, mount_problems
from virtbus.controller.core.secret_inputs import MAX_BYTES, secret_size, text_size
from virtbus.controller.core.seed_changes import SEED_HOLDERS
from virtbus.controller.core.sysprep import sysprep_problems
from virtbus.schemas.disk import DISKS_MAX, Disk, IoThreads
from virtbus.schemas.disk_rules import disk_problems
from virtbus.schemas.errors import Detail
from virtbus.schemas.image import is_sealed
from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.nic_rules import nic_problems
from virtbus.schemas.seed import TEXTS
from virtbus.schemas.vm import Interface

_Model = TypeVar("_Model", bound=BaseModel)
ROOT = "root"
"""The name of the volume with the image that the shorthand names."""
_SHORTHAND = {  # field of VmCreate → the part of a full spec that it would overwrite
    "cpus": ("domain", "cpu"),
    "memory": ("domain", "memory"),
    "network": ("networks",),
}
_USER_DATA = ("user_data", "user_data_base64")


def between_fields(data: Mapping[str, Any]) -> list[Detail]:
    """Return the problems between fields of a create request."""
    spec = _map(data.get("spec"))
    volumes = _maps(spec.get("volumes"))
    devices = _map(_map(spec.get("domain")).get("devices"))
    networks = _maps(spec.get("networks"))
    found = _shorthand_conflicts(data, spec, volumes)
    found += _duplicates("spec.volumes", volumes)
    found += _duplicates("spec.networks", networks)
    found += _sources(volumes)
    found += sysprep_problems(volumes, _maps(devices.get("disks")))
    found += _sealed(data, volumes)
    found += _ignition(spec)
    found += _partners("spec.domain.devices.disks", _maps(devices.get("disks")), volumes, "volume")
    found += _partners(
        "spec.domain.devices.interfaces", _maps(devices.get("interfaces")), networks, "network"
    )
    found += _secret_size(data, volumes)
    tags = [one.get("name") for one in _maps(devices.get("filesystems"))]
    found += mount_problems(_with_root(data, volumes), _maps(devices.get("disks")), tags)
    return found


def _with_root(
    data: Mapping[str, Any], volumes: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the volumes, and the volume of the shorthand `image` last: indices stay the same."""
    return [*volumes, {"name": ROOT}] if data.get("image") else volumes


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # five times as fast as with `Mapping`


def _maps(value: Any) -> list[Mapping[str, Any]]:
    return [_map(item) for item in value] if isinstance(value, list | tuple) else []


def _shorthand_conflicts(
    data: Mapping[str, Any], spec: Mapping[str, Any], volumes: list[Mapping[str, Any]]
) -> list[Detail]:
    found = []
    for field, path in _SHORTHAND.items():
        inner: Any = spec
        for part in path:
            inner = _map(inner).get(part)
        if data.get(field) is not None and inner:
            where = ".".join(("spec", *path))
            found.append(Detail(path=field, message=f"give either {field} or {where}, not both"))
    seeds = [_map(v.get(kind)) for v in volumes for kind in SEEDS if v.get(kind) is not None]
    own = [form for seed in seeds[:1] for form in _USER_DATA if seed.get(form) is not None]
    if data.get("user_data") is not None and own:
        message = f"give either user_data or {own[0]} of the seed in spec.volumes, not both"
        found.append(Detail(path="user_data", message=message))
    imaged = any(volume.get("image") or volume.get("container_disk") for volume in volumes)
    if data.get("image") and any(volume.get("name") == ROOT for volume in volumes):
        message = f"give either image or a volume named {ROOT} in spec.volumes, not both"
        found.append(Detail(path="image", message=message))
    if not (data.get("image") or imaged or "volumes" in spec or spec.get("network_state")):
        hint = (
            "add image: tiny, or a volume with an image; `virtbus image list` shows what is there;"
            " for an empty machine write spec.volumes: []"
        )
        message = "a VM needs an image to boot from"
        found.append(Detail(path="image", message=message, hint=hint))
    if data.get("disk") is not None and not data.get("image"):
        message = "sizes the disk of `image`; give image too, or spec.volumes[].image.size"
        found.append(Detail(path="disk", message=message))
    return found


def _duplicates(path: str, items: list[Mapping[str, Any]]) -> list[Detail]:
    seen: set[str] = set()
    found = []
    for index, item in enumerate(items):
        name = item.get("name")
        if isinstance(name, str):
            if name in seen:
                message = f"{name!r} is used twice"
                found.append(Detail(path=f"{path}[{index}].name", message=message))
            seen.add(name)
    return found


def _sources(volumes: list[Mapping[str, Any]]) -> list[Detail]:
    found = []
    kinds = (
        *("image", "container_disk", "empty_disk", "volume", "host_device", "host_disk"),
        *SEED_HOLDERS,
    )
    named: set[str] = set()
    for index, volume in enumerate(volumes):
        given = [kind for kind in kinds if volume.get(kind) is not None]
        if len(given) != 1:
            message = f"exactly one of {', '.join(kinds)} is needed; {len(given)} given"
            found.append(Detail(path=f"spec.volumes[{index}]", message=message))
        found += _seed_forms(index, volume)
        name = _map(volume.get("volume")).get("name")
        if isinstance(name, str) and name in named:
            path = f"spec.volumes[{index}].volume.name"
            found.append(Detail(path=path, message=f"{name!r:.80} is used twice"))
        named |= {name} if isinstance(name, str) else set()
    return found


def _ignition(spec: Mapping[str, Any]) -> list[Detail]:
    """Report an `ignition` without a `config`. Only a stored record may lack the `config`."""
    given = spec.get("ignition")
    if given is None or _map(given).get("config") is not None:
        return []
    return [Detail(path="spec.ignition.config", message="is missing; give Ignition's JSON")]


def _sealed(data: Mapping[str, Any], volumes: list[Mapping[str, Any]]) -> list[Detail]:
    """Refuse references that have the SHA-256 of a query in place of the query.

    Only records contain such references. With another VM's reference, a create could get the image
    behind that VM's signed URL.
    """
    given = {"image": data.get("image")}
    for index, volume in enumerate(volumes):
        given[f"spec.volumes[{index}].image.ref"] = _map(volume.get("image")).get("ref")
    message = "has the SHA-256 of a query in place of the query; give the whole URL"
    return [Detail(path=path, message=message) for path, ref in given.items() if _has_seal(ref)]


def _has_seal(ref: Any) -> bool:
    try:
        return isinstance(ref, str) and is_sealed(ref)
    except ValueError:
        return False  # pydantic reports the error


def _seed_forms(index: int, volume: Mapping[str, Any]) -> list[Detail]:
    found = []
    for kind in SEEDS:
        seed = _map(volume.get(kind))
        for name in TEXTS:
            if seed.get(name) is not None and seed.get(f"{name}_base64") is not None:
                message = f"give either {name} or {name}_base64, not both"
                path = f"spec.volumes[{index}].{kind}.{name}"
                found.append(Detail(path=path, message=message))
    return found


def _partners(
    path: str, devices: list[Mapping[str, Any]], partners: list[Mapping[str, Any]], kind: str
) -> list[Detail]:
    """Report devices without a volume or network of the same name.

    A volume or network without a device is no problem: `complete` adds the device.
    """
    found = _duplicates(path, devices)
    names = [partner.get("name") for partner in partners]
    for index, device in enumerate(devices):
        name = device.get("name")
        if isinstance(name, str) and name not in names and not _empty_drive(device):
            message = f"no {kind} is named {name!r:.80}; add one to spec.{kind}s"
            found.append(Detail(path=f"{path}[{index}].name", message=message))
    return found


def device_problems(data: object) -> Iterator[Detail]:
    """Yield the problems between valid devices. pydantic reports the problems of invalid ones."""
    domain = _map(_map(_map(data).get("spec")).get("domain"))
    devices = _map(domain.get("devices"))
    disks = _valid(Disk, _maps(devices.get("disks"))[:DISKS_MAX])
    threads = _valid(IoThreads, [_map(domain.get("io_threads"))])
    nics = _valid(Interface, _maps(devices.get("interfaces"))[:NICS_MAX])
    yield from disk_problems(disks, threads.get(0))
    yield from nic_problems(nics, disks)


def _valid(model: type[_Model], items: list[Mapping[str, Any]]) -> dict[int, _Model]:
    """Return the valid items by index."""
    found = {}
    for index, item in enumerate(items):
        with contextlib.suppress(ValidationError):
            found[index] = model.model_validate(item)
    return found


def _empty_drive(device: Mapping[str, Any]) -> bool:
    """Return True for a CD-ROM drive, which needs no volume; virtio has no CD-ROM drives."""
    return device.get("device") == "cdrom" and device.get("bus") in {"sata", "scsi"}


def _secret_size(data: Mapping[str, Any], volumes: list[Mapping[str, Any]]) -> list[Detail]:
    ignition = _map(_map(data.get("spec")).get("ignition")).get("config")
    given = {"spec.volumes": secret_size(volumes), "spec.ignition": text_size(ignition)}
    for name in ("user_data", "ssh_keys"):
        if data.get(name):
            given[name] = secret_size([{"cloud_init_no_cloud": {name: data[name]}}])
    size = sum(given.values())
    if size > MAX_BYTES:
        message = f"seeds, SSH keys, files and Ignition have {size} bytes; {MAX_BYTES} at most"
        return [Detail(path=max(given, key=given.__getitem__), message=message)]
    return []
