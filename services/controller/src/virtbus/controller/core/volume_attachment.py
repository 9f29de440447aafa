"""Computes the record of a VM that is off after a volume was attached or detached (ADR 0045)."""

from collections.abc import Iterable
from typing import Any

from virtbus.controller.core.admission import checked_spec
from virtbus.controller.core.input_sizes import refuse_large
from virtbus.controller.core.mutations import refuse_deleting
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas.disk import Disk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, Volume
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_ref import NamedVolume, VolumeRef
from virtbus.schemas.wire import spec_hash


def attached(
    record: VmRecord, status: VmStatus | None, volume: VolumeRecord, disk: Disk
) -> VmRecord:
    """Return the record with the volume as the content of `disk`; unchanged if it has the volume.

    Raises:
        VirtbusError: 400 the disk is invalid; 403 the volume has another owner; 409 as
            `refuse_up`, or the VM has a disk of that name.
    """
    ref = ref_of(volume)
    if disks_of(record, ref):
        return record
    refuse_up(record, status)
    if volume.owner != record.owner:
        message = f"the volume {volume.name} and the VM {record.name} have different owners"
        raise VirtbusError(Code.DENIED, "not_owner", message)
    spec = record.spec
    there = {one.name for one in spec.volumes} | {one.name for one in spec.domain.devices.disks}
    if disk.name in there:
        message = f"{record.name} has a disk {disk.name}; give the new disk another name"
        raise VirtbusError(Code.CONFLICT, "disk_name_taken", message)
    content = Volume(name=disk.name, volume=NamedVolume(name=volume.name))
    changed = _changed(
        record, [*spec.volumes, content], [*spec.domain.devices.disks, disk]
    ).model_copy(update={"volume_refs": {**record.volume_refs, disk.name: ref}})
    refuse_large(changed)
    return changed


def detached(record: VmRecord, status: VmStatus | None, volume: VolumeRecord) -> VmRecord:
    """Return the record without the volume and its disk; unchanged if it does not have the volume.

    Raises:
        VirtbusError: 409 as `refuse_up`.
    """
    names = disks_of(record, ref_of(volume))
    if not names:
        return record
    refuse_up(record, status)
    spec = record.spec
    refs = {name: ref for name, ref in record.volume_refs.items() if name not in names}
    return _changed(
        record,
        [one for one in spec.volumes if one.name not in names],
        [one for one in spec.domain.devices.disks if one.name not in names],
    ).model_copy(update={"volume_refs": refs})


def disks_of(record: VmRecord, ref: VolumeRef) -> set[str]:
    """Return the names of the VM's disks whose content is the volume; sizes may differ."""
    return {name for name, one in record.volume_refs.items() if one.folder == ref.folder}


def refuse_up(record: VmRecord, status: VmStatus | None) -> None:
    """Raise 409 unless the VM's node has confirmed that its guest is off, and no request is newer.

    A start changes the record. So a write over the revision of `record` fails after it.
    """
    refuse_deleting(record)
    if record.node == UNPLACED or record.evacuating:
        message = f"{record.name} has no node now; repeat when it has one"
        raise VirtbusError(Code.CONFLICT, "unplaced", message)
    asked = record.node, record.epoch, record.power_epoch
    told = None if status is None else (status.node, status.epoch, status.power_epoch)
    if record.powered:
        message = f"{record.name} is not off; `virtbus vm stop {record.name}`, then repeat"
        raise VirtbusError(Code.CONFLICT, "not_off", message)
    if status is None or told != asked or status.state is not VmState.STOPPED:
        message = f"{record.node} has not confirmed yet that {record.name} is off; repeat"
        raise VirtbusError(Code.CONFLICT, "not_off", message)


def _changed(record: VmRecord, volumes: Iterable[Volume], disks: Iterable[Disk]) -> VmRecord:
    """Return the record with these volumes and disks; raises VirtbusError 400."""
    plain: dict[str, Any] = record.spec.model_dump()
    plain["volumes"] = [one.model_dump() for one in volumes]
    plain["domain"]["devices"]["disks"] = [one.model_dump() for one in disks]
    spec = checked_spec(plain)
    update = {"spec": spec, "spec_hash": spec_hash(spec), "generation": record.generation + 1}
    return record.model_copy(update=update)
