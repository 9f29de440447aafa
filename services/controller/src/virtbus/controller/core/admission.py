"""Admission: shorthand, defaults, every problem in one answer, and the secrets taken out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from virtbus.schemas.api import VmCreate
from virtbus.schemas.errors import Detail
from virtbus.schemas.vm import (
    CloudInitNoCloud,
    Cpu,
    Disk,
    ImageVolume,
    Interface,
    Memory,
    Network,
    RunStrategy,
    VmSecrets,
    VmSpec,
    Volume,
)
from virtbus.schemas.wire import encode, invalid, problems, spec_hash

ROOT, SEED = "root", "cloudinit"
MAX_SECRET_BYTES = 512 * 1024
_SHORTHAND = {  # field of VmCreate → what it would overwrite in a full spec
    "cpus": ("domain", "cpu"),
    "memory": ("domain", "memory"),
    "network": ("networks",),
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may be placed: complete, checked, free of secrets."""

    uid: str
    namespace: str
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: VmSpec
    spec_hash: str
    secrets: VmSecrets | None
    powered: bool


def admit(data: Any, new_uid: str) -> Admitted:
    """The VM that `data` (a VmCreate as plain values) asks for.

    Raises:
        VirtbusError: 400 with all problems: of types and bounds, and between fields.
    """
    found: list[Detail] = []
    create: VmCreate | None = None
    try:
        create = VmCreate.model_validate(data)
    except ValidationError as error:
        found.extend(problems(error, model=VmCreate))
    if isinstance(data, Mapping):
        found.extend(_between_fields(data))
    if create is None or found:
        raise invalid(tuple(found))
    spec = _checked(complete(create))
    uid = create.uid or new_uid
    public, secrets = split_secrets(spec, uid)
    return Admitted(
        uid=uid,
        namespace=create.namespace,
        name=create.name,
        labels=dict(create.labels),
        annotations=dict(create.annotations),
        spec=public,
        spec_hash=spec_hash(spec),
        secrets=secrets,
        powered=starts_by_itself(spec.run_strategy),
    )


def _checked(spec: VmSpec) -> VmSpec:
    """`spec` where it keeps its own bounds with all that was filled in; else 400.

    What is stored is read again by every service, with the same bounds.
    """
    try:
        return VmSpec.model_validate(spec.model_dump())
    except ValidationError as error:
        raise invalid(problems(error, "spec")) from None


def starts_by_itself(strategy: RunStrategy) -> bool:
    """True when a VM of this strategy is powered on at its creation."""
    return strategy not in {RunStrategy.MANUAL, RunStrategy.HALTED}


def complete(create: VmCreate) -> VmSpec:
    """The whole spec: shorthand expanded, a seed, a disk per volume, a NIC per network."""
    spec = create.spec or VmSpec()
    domain = spec.domain
    if create.cpus is not None:
        domain = domain.model_copy(update={"cpu": Cpu(cores=create.cpus)})
    if create.memory is not None:
        domain = domain.model_copy(update={"memory": Memory(guest=create.memory)})
    volumes = _volumes(spec, create)
    networks = _networks(spec, create)
    have_disks = {disk.name for disk in domain.devices.disks}
    have_nics = {nic.name for nic in domain.devices.interfaces}
    devices = domain.devices.model_copy(
        update={
            "disks": domain.devices.disks
            + tuple(_disk(volume) for volume in volumes if volume.name not in have_disks),
            "interfaces": domain.devices.interfaces
            + tuple(Interface(name=n.name) for n in networks if n.name not in have_nics),
        }
    )
    domain = domain.model_copy(update={"devices": devices})
    return spec.model_copy(update={"domain": domain, "volumes": volumes, "networks": networks})


def _disk(volume: Volume) -> Disk:
    return Disk(name=volume.name, readonly=volume.cloud_init_no_cloud is not None)


def _volumes(spec: VmSpec, create: VmCreate) -> tuple[Volume, ...]:
    volumes = list(spec.volumes)
    if create.image is not None:
        root = Volume(name=ROOT, image=ImageVolume(ref=create.image, size=create.disk))
        volumes.insert(0, root)
    seeds = [i for i, volume in enumerate(volumes) if volume.cloud_init_no_cloud is not None]
    if not seeds:
        volumes.append(Volume(name=SEED, cloud_init_no_cloud=CloudInitNoCloud()))
        seeds = [len(volumes) - 1]
    seed = volumes[seeds[0]].cloud_init_no_cloud or CloudInitNoCloud()
    seed = seed.model_copy(
        update={
            "hostname": seed.hostname or create.name,
            "ssh_keys": seed.ssh_keys + create.ssh_keys,
            "user_data": create.user_data if create.user_data is not None else seed.user_data,
        }
    )
    volumes[seeds[0]] = volumes[seeds[0]].model_copy(update={"cloud_init_no_cloud": seed})
    return tuple(volumes)


def _networks(spec: VmSpec, create: VmCreate) -> tuple[Network, ...]:
    if create.network is not None:
        return (Network(name="default", network=create.network),)
    if "networks" in spec.model_fields_set or spec.networks:
        return spec.networks  # an explicit empty list means: no network
    return (Network(name="default"),)


def split_secrets(spec: VmSpec, uid: str) -> tuple[VmSpec, VmSecrets | None]:
    """The spec without user-data and network-data, and these by volume name (design §3 rule 8)."""
    secret: dict[str, CloudInitNoCloud] = {}
    volumes = []
    for volume in spec.volumes:
        seed = volume.cloud_init_no_cloud
        if seed is not None and (seed.user_data is not None or seed.network_data is not None):
            secret[volume.name] = seed
            bare = seed.model_copy(update={"user_data": None, "network_data": None})
            volumes.append(volume.model_copy(update={"cloud_init_no_cloud": bare}))
        else:
            volumes.append(volume)
    if not secret:
        return spec, None
    return spec.model_copy(update={"volumes": tuple(volumes)}), VmSecrets(
        uid=uid, cloud_init=secret
    )


# --- problems between fields -----------------------------------------------------------------
# These read the request as it came, junk and all, so that they are told in the same answer as
# the problems that pydantic found; a value of a wrong type is pydantic's to report and skipped.


def _between_fields(data: Mapping[str, Any]) -> list[Detail]:
    spec = _map(data.get("spec"))
    volumes = _maps(spec.get("volumes"))
    devices = _map(_map(spec.get("domain")).get("devices"))
    networks = _maps(spec.get("networks"))
    found = _shorthand_conflicts(data, spec, volumes)
    found += _duplicates("spec.volumes", volumes)
    found += _duplicates("spec.networks", networks)
    found += _sources(volumes)
    found += _partners("spec.domain.devices.disks", _maps(devices.get("disks")), volumes, "volume")
    found += _partners(
        "spec.domain.devices.interfaces", _maps(devices.get("interfaces")), networks, "network"
    )
    found += _secret_size(data, volumes)
    return found


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
    imaged = any(volume.get("image") or volume.get("container_disk") for volume in volumes)
    if data.get("image") and any(volume.get("name") == ROOT for volume in volumes):
        message = f"give either image or a volume named {ROOT} in spec.volumes, not both"
        found.append(Detail(path="image", message=message))
    if not data.get("image") and not imaged:
        hint = (
            "add image: tiny, or a volume with an image; `virtbus image list` shows what is there"
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
    kinds = ("image", "container_disk", "empty_disk", "cloud_init_no_cloud")
    for index, volume in enumerate(volumes):
        given = [kind for kind in kinds if volume.get(kind) is not None]
        if len(given) != 1:
            message = f"exactly one of {', '.join(kinds)} is needed; {len(given)} given"
            found.append(Detail(path=f"spec.volumes[{index}]", message=message))
    return found


def _partners(
    path: str, devices: list[Mapping[str, Any]], partners: list[Mapping[str, Any]], kind: str
) -> list[Detail]:
    """Each device's contents are named like it; the other direction is filled in."""
    found = _duplicates(path, devices)
    names = [partner.get("name") for partner in partners]
    for index, device in enumerate(devices):
        if isinstance(device.get("name"), str) and device["name"] not in names:
            message = f"no {kind} is named {device['name']!r}"
            found.append(Detail(path=f"{path}[{index}].name", message=message))
    return found


def _secret_size(data: Mapping[str, Any], volumes: list[Mapping[str, Any]]) -> list[Detail]:
    texts = [data.get("user_data")]
    for volume in volumes:
        seed = _map(volume.get("cloud_init_no_cloud"))
        texts += [seed.get("user_data"), seed.get("network_data")]
    size = len(json.dumps([text for text in texts if isinstance(text, str)]).encode())
    if size > MAX_SECRET_BYTES:
        message = f"user-data and network-data have {size} bytes; {MAX_SECRET_BYTES} at most"
        return [Detail(path="user_data", message=message)]
    return []


def secret_bytes(secrets: VmSecrets) -> bytes:
    """The entry of `$KV.sec`; its SHA-256 is the record's `sec_digest`."""
    return encode(secrets)
