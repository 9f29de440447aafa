"""Admits creates: expands the shorthand, fills defaults, reports problems, separates secrets."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from virtbus.controller.core.create_problems import ROOT, between_fields, device_problems
from virtbus.controller.core.disk_serials import SEEDS
from virtbus.controller.core.secret_inputs import split_secrets
from virtbus.controller.core.seed_changes import SEED_HOLDERS, network_findings
from virtbus.schemas.api import VmCreate
from virtbus.schemas.disk_rules import disk_problems
from virtbus.schemas.errors import Detail
from virtbus.schemas.filesystem import filesystem_problems
from virtbus.schemas.nic_rules import nic_problems
from virtbus.schemas.seed import NETWORK_LATER
from virtbus.schemas.vm import RunStrategy, VmSecrets, VmSpec
from virtbus.schemas.wire import canonical, invalid, problems

Plain = dict[str, Any]
SEED = "cloudinit"
_UNKNOWN = "is a key that cloud-init does not know; it has no effect, or only with netplan"


class AdmittedVm(NamedTuple):
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
        found.extend(between_fields(data))
    unknown: list[Detail] = []
    if create is not None:
        unknown = _network_data(create, found)
    if create is None or found:
        raise invalid((*found, *device_problems(data)))
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
    """Return the complete spec as a model; raise VirtbusError 400 for values out of bounds.

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
        seed["user_data"] = create.user_data
    return volumes


def _networks(create: VmCreate) -> Sequence[Plain]:
    if create.network is not None:
        return [{"name": "default", "network": create.network}]
    spec = create.spec
    if spec is not None and ("networks" in spec.model_fields_set or spec.networks):
        # an explicit empty list means no network
        return [one.model_dump() for one in spec.networks]
    return [{"name": "default"}]
