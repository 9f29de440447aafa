"""Computes the record of an existing VM after a start, stop, update or delete."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from virtbus.controller.core.admission import check_devices, starts_by_itself
from virtbus.controller.core.nic_changes import check_partners, with_nics_of
from virtbus.controller.core.secret_inputs import split_secrets
from virtbus.controller.core.seed_changes import OF_A_SEED
from virtbus.controller.core.volume_holds import refuse_buffered
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.disk_rules import is_drive
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.filesystem import FILESYSTEMS
from virtbus.schemas.image import ImageTarget, parse_image_ref, sealed_ref, shown_ref
from virtbus.schemas.image_name import ImageNameRecord
from virtbus.schemas.network import NetworkState
from virtbus.schemas.network_object import NetworkRecord
from virtbus.schemas.security_group import SecurityGroupRecord
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.vm import VmRecord, VmSpec, Volume
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import spec_hash

RecordT = TypeVar(
    "RecordT",
    VmRecord,
    VolumeRecord,
    SnapshotRecord,
    ImageNameRecord,
    NetworkRecord,
    SecurityGroupRecord,
    BackupScheduleRecord,
)

LIVE = frozenset(
    {
        *("spec.run_strategy", "spec.start_strategy", "spec.node_selector"),
        *("spec.termination_grace_s", "spec.eviction_strategy", "spec.protected"),
        *("spec.domain.resources", "spec.network_state"),
    }
)
"""Fields that take effect at once, even while the guest runs."""

AT_RESTART = (
    "spec.domain.cpu.",
    "spec.domain.memory.",
    "spec.domain.firmware.",
    "spec.domain.accelerator",
    "spec.domain.io_threads",
    "spec.domain.devices.watchdog",
    "spec.dns_config",
    FILESYSTEMS,
)
OF_DEVICES = (
    *("spec.domain.devices.disks", "spec.domain.io_threads"),
    *("spec.domain.devices.interfaces", "spec.networks", FILESYSTEMS),
)
# Strings, so that `re` compiles an expression at its first use and not at each start.
OF_A_DISK = (
    r"spec\.domain\.devices\.disks\[[0-9]+\]\."
    r"(boot_order|serial|error_policy|read_error_policy|cache|io|discard|detect_zeroes|block_size"
    r"|dedicated_io_thread|limits|tray)(\.|$)"
)
OF_A_NIC = (
    r"spec\.domain\.devices\.interfaces\[[0-9]+\]\."
    r"(model$|boot_order$|acpi_index$|mtu$|queues$|publish(\.|\[|$)"
    r"|binding$|ports(\.|\[|$)|vm_network_cidr$|vm_ipv6_network_cidr$)"
)
"""Changes of AT_RESTART, OF_A_DISK and OF_A_NIC take effect at the guest's next start.

Until then the VM shows RestartRequired. The agent applies `limits` and `tray` of OF_A_DISK to the
running guest.
"""
OF_A_SIZE = r"spec\.volumes\[([0-9]+)\]\.(image\.size|empty_disk\.capacity)$"
OF_A_MEDIUM = r"spec\.volumes\[([0-9]+)\]\.image\.ref$"
LIVE_OF_A_NIC = r"spec\.domain\.devices\.interfaces\[[0-9]+\]\.(state$|limits(\.|$))"
"""Fields of interfaces that netd and the agent apply to a running guest."""

REQUESTS_KEPT = 4
"""Number of request ids that a record keeps. They identify repeated requests."""


def changed_paths(before: Any, after: Any, path: str) -> Iterator[str]:
    """Yield the paths of changed values in the form of error details: `spec.volumes[0].image.size`.

    If the length of a list changed, only the path of the list is yielded.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from changed_paths(before.get(key), after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from changed_paths(old, new, f"{path}[{index}]")
    elif before != after:
        yield path


def updated(
    record: VmRecord,
    *,
    spec: VmSpec | None,
    reseeded: bool = False,
    labels: dict[str, str] | None,
    annotations: dict[str, str] | None,
) -> VmRecord:
    """Return the record with the new spec, labels and annotations (None: unchanged).

    `reseeded` is True if secrets of the first-boot data change. `spec` does not contain these
    secrets.

    Raises:
        VirtbusError: 400: the devices have problems. 409: the VM is being deleted, or is powered
            with a released network. 422: some fields cannot change; the details name them.
    """
    refuse_deleting(record)
    update: dict[str, Any] = {}
    if labels is not None:
        update["labels"] = dict(labels)
    if annotations is not None:
        update["annotations"] = dict(annotations)
    if spec is not None:
        update |= _of_spec(record, spec, reseeded=reseeded)
    changed = record.model_copy(update=update)
    refuse_buffered(changed.spec, changed.volume_refs)
    return refuse_released(changed)


def _of_spec(record: VmRecord, spec: VmSpec, *, reseeded: bool) -> dict[str, Any]:
    """Return the record fields that a new spec changes; raise VirtbusError as `updated` does."""
    update: dict[str, Any] = {}
    spec = _sealed_as_before(spec, record.spec)
    public, _ = split_secrets(spec, record.uid)
    there, plain = record.spec.model_dump(mode="json"), public.model_dump(mode="json")
    paths = list(changed_paths(there, plain, "spec"))
    kept = changed_paths(with_nics_of(there, plain), plain, "spec")
    grown = grown_disks(record.spec, public)
    fixed = [p for p in kept if not (_live(p) or _at_restart(p) or _is_size(p, public, grown))]
    fixed = [path for path in fixed if not _is_medium(path, public)]
    # a field differs between `public` and `spec` if it has a secret; refuse these fields, too
    fixed += changed_paths(plain, spec.model_dump(mode="json"), "spec")
    if fixed:
        message = "these fields cannot change while the VM exists; delete it and create it again"
        details = tuple(Detail(path=p, message="cannot be changed") for p in fixed)
        raise VirtbusError(Code.UNSUPPORTED, "immutable", message, details=details)
    if any(path.startswith(OF_DEVICES) for path in paths):
        check_devices(public)
        check_partners(public)
    if reseeded or any(re.match(OF_A_SEED, path) for path in paths):
        update["seed_generation"] = record.seed_generation + 1
    if paths or reseeded:
        update |= {"spec": public, "spec_hash": spec_hash(public)}
        update["generation"] = record.generation + 1
    if spec.run_strategy is not record.spec.run_strategy:
        update |= _switched(record, spec)
    return update


def grown_disks(before: VmSpec, after: VmSpec) -> frozenset[str]:
    """Return the names of the VM's own disks that become larger."""
    had = {volume.name: _size_of(volume) for volume in before.volumes}
    sizes = ((volume.name, _size_of(volume)) for volume in after.volumes)
    return frozenset(name for name, size in sizes if size > had.get(name, size))


def _size_of(volume: Volume) -> int:
    """Return the requested size of a VM's own disk in bytes; 0 without a requested size."""
    if volume.image is not None:
        return volume.image.size or 0
    return volume.empty_disk.capacity if volume.empty_disk is not None else 0


def _is_size(path: str, spec: VmSpec, grown: frozenset[str]) -> bool:
    """Return True if the path is the size of a disk that has grown; a disk cannot shrink."""
    found = re.match(OF_A_SIZE, path)
    return found is not None and spec.volumes[int(found[1])].name in grown


def _is_medium(path: str, spec: VmSpec) -> bool:
    """Return True if the path is the image of a CD-ROM drive, whose medium can be changed."""
    found = re.match(OF_A_MEDIUM, path)
    drives = {disk.name for disk in spec.domain.devices.disks if is_drive(disk)}
    return found is not None and spec.volumes[int(found[1])].name in drives


def with_targets(record: VmRecord, before: VmRecord, found: Mapping[str, ImageTarget]) -> VmRecord:
    """Return `record`, an update of `before`, with the targets of its image names.

    `found` has the targets of the new image names. A name that `before` uses keeps its former
    target.

    Raises:
        VirtbusError: 422 `medium_unpinned`: a new image has no digest. The node could not tell the
            new medium from the former one.
    """
    had = {volume.image_ref for volume in before.spec.volumes}
    old, new = set(), []
    for index, volume in enumerate(record.spec.volumes):
        if volume.image_ref not in had:
            new.append((f"spec.volumes[{index}].image.ref", volume.image_ref))
        elif volume.image_ref:
            old.add(parse_image_ref(volume.image_ref).locator)
    kept = {name: one for name, one in record.image_targets.items() if name in old}
    targets = {**found, **kept}
    message = "another medium needs a digest: REF@sha256:…; `virtbus vm insert` finds it"
    unpinned = []
    for path, ref in new:
        source = parse_image_ref(ref)
        if source._replace(target=targets.get(source.locator)).file_digest is None:
            unpinned.append(Detail(path=path, message=message))
    if unpinned:
        raise VirtbusError(Code.UNSUPPORTED, "medium_unpinned", message, details=tuple(unpinned))
    return record.model_copy(update={"image_targets": targets}) if new else record


def _at_restart(path: str) -> bool:
    of_a_device = re.match(OF_A_DISK, path) or re.match(OF_A_NIC, path)
    return path.startswith(AT_RESTART) or bool(of_a_device or re.match(OF_A_SEED, path))


def _sealed_as_before(spec: VmSpec, before: VmSpec) -> VmSpec:
    """Return the spec with the sealed references of `before` for the images that do not change.

    A sealed reference has a SHA-256 in place of its URL's query (`sealed_ref`). A request may give
    the reference of `before` with its query or without any query. Both mean the same image.
    """
    known = {volume.name: volume.image.ref for volume in before.volumes if volume.image is not None}
    volumes = tuple(_sealed_as(volume, known.get(volume.name, "")) for volume in spec.volumes)
    return spec.model_copy(update={"volumes": volumes})


def _sealed_as(volume: Volume, known: str) -> Volume:
    image = volume.image
    if image is None or not known or image.ref == known:
        return volume
    if image.ref != shown_ref(known) and sealed_ref(image.ref)[0] != known:
        return volume
    return volume.model_copy(update={"image": image.model_copy(update={"ref": known})})


def _switched(record: VmRecord, spec: VmSpec) -> dict[str, Any]:
    """Return the fields of the power state that a new run strategy changes."""
    on = starts_by_itself(spec.run_strategy)
    paused = record.paused if on and record.powered else on and starts_paused(spec)
    return _power(record, on=on, paused=paused)


def _power(
    record: VmRecord, *, on: bool, paused: bool, grace_s: int | None = None
) -> dict[str, Any]:
    """Return the fields that a start (`on`) or stop changes; they drop an earlier grace.

    The pause epoch rises if `paused` changes, because an agent that was cut off sees only the last
    record. Suppose that a paused VM was stopped and started meanwhile: its old guest is still
    paused. The agent unpauses this guest only for a higher pause epoch.
    """
    pause_epoch = record.pause_epoch + (paused != record.paused)
    epochs = {"power_epoch": record.power_epoch + 1, "pause_epoch": pause_epoch}
    return {"powered": on, "paused": paused, "stop_grace_s": grace_s, **epochs}


def _live(path: str) -> bool:
    if re.match(LIVE_OF_A_NIC, path):
        return True
    return any(path == field or path.startswith(f"{field}.") for field in LIVE)


def starts_paused(spec: VmSpec) -> bool:
    """Return True if a start leaves the VM paused by default."""
    return spec.start_strategy == "Paused"


def powered(
    record: VmRecord, *, on: bool, grace_s: int | None = None, paused: bool | None = None
) -> VmRecord:
    """Return the record after a start (`on`) or stop, with a higher power epoch.

    `paused` is True if the start leaves the guest paused. If it is None, the spec decides.

    Raises:
        VirtbusError: 409: the VM is being deleted, or should start with a released network.
    """
    refuse_deleting(record)
    still = starts_paused(record.spec) if paused is None else paused
    update = _power(record, on=on, paused=on and still, grace_s=grace_s)
    return refuse_released(record.model_copy(update=update))


def refuse_released(record: VmRecord) -> VmRecord:
    """Return the record; raise VirtbusError 409 if it is powered while its network is released."""
    if record.powered and record.spec.network_state is NetworkState.RELEASED:
        message = (
            f"the network of {record.name} is released, so no guest can run; set "
            "spec.network_state to Held before a start, and stop the guest before a release"
        )
        raise VirtbusError(Code.CONFLICT, "network_released", message)
    return record


def started(record: VmRecord, *, up: bool, paused: bool | None) -> VmRecord:
    """Return the record after a start; `paused` has the meaning that it has for `powered`.

    If the VM is `up` (running or starting), the record's `paused` does not change.

    Raises:
        VirtbusError: 409: the VM is up, and the request wants a paused start. The errors of
            `powered`.
    """
    if up and paused and not record.paused:
        message = f"{record.name} runs already; `virtbus vm pause {record.name}` pauses it"
        raise VirtbusError(Code.CONFLICT, "running", message)
    return powered(record, on=True, paused=record.paused if up else paused)


def restarted(record: VmRecord, *, up: bool, grace_s: int | None) -> VmRecord:
    """Return the record after a restart; raise VirtbusError 409 if down, or as `powered` does."""
    refuse_deleting(record)
    _refuse_down(record, up=up)
    new = powered(record, on=True, grace_s=grace_s)
    return new.model_copy(update={"restart_epoch": new.power_epoch})


def paused(record: VmRecord, *, up: bool, on: bool) -> VmRecord:
    """Return the record after a pause (`on`) or unpause; raise 409 if down or being deleted."""
    refuse_deleting(record)
    _refuse_down(record, up=up)
    return record.model_copy(update={"paused": on, "pause_epoch": record.pause_epoch + 1})


def _refuse_down(record: VmRecord, *, up: bool) -> None:
    if not up:
        message = f"{record.name} is not running; `virtbus vm start {record.name}` starts it"
        raise VirtbusError(Code.CONFLICT, "not_running", message)


def with_request(record: RecordT, before: RecordT | None, request_id: str) -> RecordT:
    """Return the record with the request's id; unchanged if it equals `before`, the old record."""
    if record == before or not request_id:
        return record
    return record.model_copy(update={"requests": remembered(record.requests, request_id)})


def remembered(requests: tuple[str, ...], request_id: str) -> tuple[str, ...]:
    """Return the ids of the last requests, with the new id."""
    return (*requests, request_id)[-REQUESTS_KEPT:] if request_id else requests


def refuse_protected(record: VmRecord) -> None:
    """Raise 409 if the spec protects the VM, for example from deletes."""
    if record.spec.protected:
        message = (
            f"{record.name} is protected; `virtbus vm update {record.name} --no-protected "
            f"-n {record.namespace}` clears that"
        )
        raise VirtbusError(Code.CONFLICT, "protected", message)


def deleting(record: VmRecord, grace_s: int | None) -> VmRecord:
    """Return the record after a delete request. A repeated request may only shorten the grace.

    Raises:
        VirtbusError: 409 `protected`: an update must first end the VM's protection.
    """
    if not record.deleting:
        refuse_protected(record)
    default_s = record.spec.termination_grace_s
    before_s = default_s if record.delete_grace_s is None else record.delete_grace_s
    # A requested 0 ends a guest in any state, which a 0 of the spec does not do. So a requested 0
    # is stored even if the spec's grace is 0, too.
    forced = grace_s == 0 != record.delete_grace_s
    if record.deleting and not forced and (default_s if grace_s is None else grace_s) >= before_s:
        return record
    return record.model_copy(update={"deleting": True, "delete_grace_s": grace_s})


def refuse_deleting(record: VmRecord) -> None:
    """Raise 409 while the VM is being deleted."""
    if record.deleting:
        message = f"{record.name} is being deleted; wait for vm.deleted, then create it again"
        raise VirtbusError(Code.CONFLICT, "deleting", message)
