"""Admits creates: expands the shorthand, fills defaults, reports problems, separates secrets."""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from virtbus.controller.core.disk_serials import SEEDS, mount_problems
from virtbus.controller.core.secret_inputs import MAX_BYTES, secret_size, split_secrets, text_size
from virtbus.controller.core.seed_changes import SEED_HOLDERS, network_findings
from virtbus.controller.core.sysprep import sysprep_problems
from virtbus.schemas.api import VmCreate
from virtbus.schemas.disk import DISKS_MAX, Disk, IoThreads
from virtbus.schemas.disk_rules import disk_problems
from virtbus.schemas.errors import Detail
from virtbus.schemas.filesystem import filesystem_problems
from virtbus.schemas.image import is_sealed
from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.nic_rules import nic_problems
from virtbus.schemas.seed import NETWORK_LATER, TEXTS
from virtbus.schemas.vm import Interface, RunStrategy, VmSecrets, VmSpec
from virtbus.schemas.wire import canonical, invalid, problems

Plain = dict[str, Any]
ROOT, SEED = "root", "cloudinit"
_UNKNOWN = "is a key that cloud-init does not know; it has no effect, or only with netplan"
_SHORTHAND = {  # field of VmCreate → the part of a full spec that it would overwrite
    "cpus": ("domain", "cpu"),
    "memory": ("domain", "memory"),
    "network": ("networks",),
}


@dataclass(frozen=True, slots=True)
class AdmittedVm:
    """A valid create request. `spec` is complete; its secrets are in `secrets` only."""

    uid: str
    namespace: str
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: VmSpec
    spec_hash: str
    spec_bytes: int
    """Size of the canonical spec, secrets included."""
    secrets: VmSecrets | None
    powered: bool
    origin: str | None = None
    """The name of the snapshot that the VM's disks begin with."""
    warnings: tuple[Detail, ...] = ()
    """Parts of the request that are accepted, and probably have no effect."""


def admit(data: Any, new_uid: str) -> AdmittedVm:
    """Return the VM that `data` (a VmCreate as plain values) requests.

    Raises:
        VirtbusError: 400 with all problems, of single fields and between fields.
    """
    found: list[Detail] = []
    create: VmCreate | None = None
    try:
        create = VmCreate.model_validate(data, context=NETWORK_LATER)
    except ValidationError as error:
        found.extend(problems(error, model=VmCreate))
    if isinstance(data, Mapping):
        found.extend(_between_fields(data))
        disks, threads = _valid_devices(data)
        found.extend(disk_problems(disks, threads))
        found.extend(nic_problems(_valid_nics(data), disks))
    unknown: list[Detail] = []
    if create is not None:
        unknown = _network_data(create, found)
    if create is None or found:
        raise invalid(tuple(found))
    spec = checked_spec(complete(create))
    uid = create.uid or new_uid
    public, secrets = split_secrets(spec, uid)
    encoded = canonical(spec)
    return AdmittedVm(
        uid=uid,
        namespace=create.namespace,
        name=create.name,
        labels=dict(create.labels),
        annotations=dict(create.annotations),
        spec=public,
        spec_hash=hashlib.sha256(encoded).hexdigest(),
        spec_bytes=len(encoded),
        secrets=secrets,
        powered=starts_by_itself(spec.run_strategy),
        origin=create.origin,
        warnings=tuple(unknown),
    )


def _network_data(create: VmCreate, found: list[Detail]) -> list[Detail]:
    """Add the problems of the seeds' network data to `found`; return warnings of unknown keys."""
    unknown: list[Detail] = []
    volumes = create.spec.volumes if create.spec is not None else ()
    for path, findings in network_findings(volumes):
        found += [Detail(path=path, message=one) for one in findings.problems]
        unknown += [Detail(path=path, message=f"{one}: {_UNKNOWN}") for one in findings.unknown]
    return unknown


def checked_spec(spec: Plain) -> VmSpec:
    """Return the complete spec as a model; raise VirtbusError 400 if it is out of bounds.

    Every service reads the stored spec with the same bounds.
    """
    try:
        valid = VmSpec.model_validate(spec, context=NETWORK_LATER)
    except ValidationError as error:
        raise invalid(problems(error, "spec")) from None
    check_devices(valid)  # `complete` has added disks
    return valid


def check_devices(spec: VmSpec) -> None:
    """Raise VirtbusError 400 with all problems of the devices of a complete spec."""
    devices = spec.domain.devices
    disks, nics = dict(enumerate(devices.disks)), dict(enumerate(devices.interfaces))
    found = [*disk_problems(disks, spec.domain.io_threads), *nic_problems(nics, disks)]
    found += filesystem_problems(devices.filesystems, [one.name for one in spec.volumes])
    if found:
        raise invalid(tuple(found))


def starts_by_itself(strategy: RunStrategy) -> bool:
    """Return True if a VM of this strategy is powered on at its creation."""
    return strategy not in {RunStrategy.MANUAL, RunStrategy.HALTED}


def complete(create: VmCreate) -> Plain:
    """Return the complete spec: shorthand expanded, with a seed, a disk for each volume, and NICs.

    The spec is plain data. With copies of models, a create would take three times as long.
    """
    spec = create.spec.model_dump() if create.spec is not None else {}
    domain = spec.setdefault("domain", {})
    if create.cpus is not None:
        domain["cpu"] = {"cores": create.cpus}
    if create.memory is not None:
        domain["memory"] = {"guest": create.memory}
    spec["volumes"] = volumes = _volumes(spec.get("volumes", ()), create)
    spec["networks"] = networks = _networks(create)
    devices = domain.setdefault("devices", {})
    disks, nics = devices.get("disks", ()), devices.get("interfaces", ())
    have_disks, have_nics = {disk["name"] for disk in disks}, {nic["name"] for nic in nics}
    devices["disks"] = [*disks, *(_disk(v) for v in volumes if v["name"] not in have_disks)]
    lacking = [{"name": one["name"]} for one in networks if one["name"] not in have_nics]
    devices["interfaces"] = [*nics, *lacking]
    return spec


def _disk(volume: Plain) -> Plain:
    if volume.get("sysprep") is not None:
        return {"name": volume["name"], "device": "cdrom", "bus": "sata", "readonly": True}
    iso = any(volume.get(kind) is not None for kind in SEED_HOLDERS)
    return {"name": volume["name"], "readonly": iso}


def _volumes(given: Iterable[Plain], create: VmCreate) -> list[Plain]:
    volumes = list(given)
    if create.image is not None:
        image = {"ref": create.image, "size": create.disk}
        volumes.insert(0, {"name": ROOT, "image": image})
    seeds = [v[kind] for v in volumes for kind in SEEDS if v.get(kind) is not None]
    state = create.spec.network_state if create.spec is not None else None
    if not (seeds or volumes) and state is not None:
        return []  # a second create adds the disks
    if not seeds:
        seeds = [{}]
        volumes.append({"name": SEED, "cloud_init_no_cloud": seeds[0]})
    seed = seeds[0]
    seed["hostname"] = seed.get("hostname") or create.name
    seed["ssh_keys"] = (*seed.get("ssh_keys", ()), *create.ssh_keys)
    if create.user_data is not None:
        seed |= {"user_data": create.user_data, "user_data_base64": None}
    return volumes


def _networks(create: VmCreate) -> Sequence[Plain]:
    if create.network is not None:
        return [{"name": "default", "network": create.network}]
    spec = create.spec
    if spec is not None and ("networks" in spec.model_fields_set or spec.networks):
        # an explicit empty list means no network
        return [one.model_dump() for one in spec.networks]
    return [{"name": "default"}]


# --- problems between fields -----------------------------------------------------------------
# These functions read the raw request, so that one answer has their problems and pydantic's. They
# skip values of a wrong type, because pydantic reports these values.


def _between_fields(data: Mapping[str, Any]) -> list[Detail]:
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
    """Return the volumes, then the volume of the shorthand `image`: the indices stay the same."""
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


def _valid_devices(data: Mapping[str, Any]) -> tuple[dict[int, Disk], IoThreads | None]:
    """Return valid disks by index, and valid threads. pydantic reports all other problems."""
    domain = _map(_map(data.get("spec")).get("domain"))
    disks, threads = {}, None
    for index, disk in enumerate(_maps(_map(domain.get("devices")).get("disks"))[:DISKS_MAX]):
        with contextlib.suppress(ValidationError):
            disks[index] = Disk.model_validate(disk)
    if domain.get("io_threads") is not None:
        with contextlib.suppress(ValidationError):
            threads = IoThreads.model_validate(domain["io_threads"])
    return disks, threads


def _valid_nics(data: Mapping[str, Any]) -> dict[int, Interface]:
    """Return valid interfaces by index. pydantic reports the problems of invalid ones."""
    devices = _map(_map(_map(data.get("spec")).get("domain")).get("devices"))
    nics = {}
    for index, nic in enumerate(_maps(devices.get("interfaces"))[:NICS_MAX]):
        with contextlib.suppress(ValidationError):
            nics[index] = Interface.model_validate(nic)
    return nics


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
