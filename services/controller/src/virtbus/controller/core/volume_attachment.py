"""Computes a VM's record after a volume was attached, detached or grown (ADR 0045, 0056)."""

from collections.abc import Iterable
from typing import Any

from virtbus.controller.core.admission import checked_spec
from virtbus.controller.core.input_sizes import refuse_large
from virtbus.controller.core.mutations import grown_disks, refuse_deleting
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas.disk import Disk, DiskBus
from virtbus.schemas.disk_buses import ABILITIES, Verb
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestInfo
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, Volume
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_ref import NamedVolume, VolumeRef
from virtbus.schemas.wire import spec_hash

NO_USB = "a running guest has a USB controller only if it has a USB disk; use virtio or scsi"


def attached(
    record: VmRecord, status: VmStatus | None, volume: VolumeRecord, disk: Disk
) -> VmRecord:
    """Return the record with the volume in `disk`; unchanged if the VM already has the volume.

    Raises:
        VirtbusError: 400: the disk is invalid. 403 `not_owner`: the VM and the volume have
            different owners. 409 `detaching`: the volume is being detached from the VM. 409
            `disk_name_taken`: the VM has a disk of that name. The errors of `refuse_unplaced`,
            `refuse_running` and `refuse_large`.
    """
    ref = ref_of(volume)
    if names := disks_of(record, ref):
        if names & record.detaching.keys():
            message = f"{volume.name} is being detached from {record.name}; repeat after that"
            raise VirtbusError(Code.CONFLICT, "detaching", message, after_ms=1000)
        return record
    refuse_unplaced(record)
    refuse_running(record, status, Verb.HOT_PLUG, disk)
    if volume.owner != record.owner:
        message = f"the volume {volume.name} and the VM {record.name} have different owners"
        raise VirtbusError(Code.DENIED, "not_owner", message)
    spec = record.spec
    there = {one.name for one in spec.volumes} | {one.name for one in spec.domain.devices.disks}
    if disk.name in there | record.volume_refs.keys():
        message = f"{record.name} has a disk {disk.name}; give the new disk another name"
        raise VirtbusError(Code.CONFLICT, "disk_name_taken", message)
    content = Volume(name=disk.name, volume=NamedVolume(name=volume.name))
    changed = _changed(
        record, [*spec.volumes, content], [*spec.domain.devices.disks, disk]
    ).model_copy(update={"volume_refs": {**record.volume_refs, disk.name: ref}})
    refuse_large(changed)
    return changed


def detached(record: VmRecord, status: VmStatus | None, volume: VolumeRecord) -> VmRecord:
    """Return the record without the volume's disk; unchanged if the VM does not have the volume.

    If the VM may run, `volume_refs` keeps the volume. `released` removes it after the VM's node has
    detached the disk.

    Raises:
        VirtbusError: the 409 errors of `refuse_unplaced` and `refuse_running`.
    """
    names = disks_of(record, ref_of(volume))
    if not names:
        return record
    refuse_unplaced(record)
    refs = record.volume_refs
    if is_off(record, status):
        refs = {name: ref for name, ref in refs.items() if name not in names}
    elif names <= record.detaching.keys():
        return record
    for disk in record.spec.domain.devices.disks:
        if disk.name in names:
            refuse_running(record, status, Verb.UNPLUG, disk)
    spec = record.spec
    return _changed(
        record,
        [one for one in spec.volumes if one.name not in names],
        [one for one in spec.domain.devices.disks if one.name not in names],
    ).model_copy(update={"volume_refs": refs})


def refuse_mounted(
    record: VmRecord, volume: VolumeRecord, info: GuestInfo, names: set[str]
) -> None:
    """Raise 409 if the guest has mounted a file system of a disk in `names`."""
    mounted = [
        one.mountpoint or one.name for one in info.filesystems if names & set(one.spec_disks)
    ]
    if mounted:
        message = (
            f"{volume.name} is mounted in the guest of {record.name} at {', '.join(mounted[:3])}; "
            "unmount it there, or detach it with --force"
        )
        raise VirtbusError(Code.CONFLICT, "volume_mounted", message)


def released(record: VmRecord, status: VmStatus | None) -> VmRecord:
    """Return the record without the volumes that its node has detached.

    The status must have the record's node and epoch, and at least its generation. An older status
    may report an earlier detach.
    """
    if status is None or (status.node, status.epoch) != (record.node, record.epoch):
        return record
    gone = set(status.detached) & record.detaching.keys()
    if not gone or status.generation < record.generation:
        return record
    refs = {name: ref for name, ref in record.volume_refs.items() if name not in gone}
    return record.model_copy(update={"volume_refs": refs})


def grown(
    record: VmRecord, status: VmStatus | None, volume: VolumeRecord, size_bytes: int
) -> VmRecord:
    """Return the record with the volume's new size; unchanged if that size is not larger.

    Raises:
        VirtbusError: the 409 errors of `refuse_unplaced` and `refuse_running`.
    """
    names = disks_of(record, ref_of(volume))
    refs = {
        name: ref.model_copy(update={"size_bytes": max(size_bytes, ref.size_bytes)})
        for name, ref in record.volume_refs.items()
        if name in names
    }
    if all(record.volume_refs[name] == ref for name, ref in refs.items()):
        return record
    refuse_unplaced(record)
    for disk in record.spec.domain.devices.disks:
        if disk.name in names:
            refuse_running(record, status, Verb.GROW, disk)
    update = {"volume_refs": {**record.volume_refs, **refs}, "generation": record.generation + 1}
    return record.model_copy(update=update)


def refuse_growth(before: VmRecord, after: VmRecord, status: VmStatus | None) -> None:
    """Raise the 409 of `refuse_running` if an update grows one of the VM's own disks."""
    names = grown_disks(before.spec, after.spec)
    for disk in after.spec.domain.devices.disks:
        if disk.name in names:
            refuse_running(before, status, Verb.GROW, disk)


def disks_of(record: VmRecord, ref: VolumeRef) -> set[str]:
    """Return the names of the VM's disks that contain the volume. Its size does not matter."""
    return {name for name, one in record.volume_refs.items() if one.folder == ref.folder}


def disks_pending(status: VmStatus | None, names: set[str]) -> str:
    """Return why disks in `names` do not match the record yet; empty if they all match."""
    waits = status.disks_pending if status is not None else {}
    return "; ".join(waits[name] for name in sorted(names & waits.keys()))


def refuse_unplaced(record: VmRecord) -> None:
    """Raise 409 if the VM is being deleted, has no node, or is leaving its node."""
    refuse_deleting(record)
    if record.node == UNPLACED or record.evacuating:
        message = f"{record.name} has no node now; repeat when it has one"
        raise VirtbusError(Code.CONFLICT, "unplaced", message)


def is_off(record: VmRecord, status: VmStatus | None) -> bool:
    """Return True if the VM's node has confirmed the last power request, and the guest is off.

    Each start changes the record. So if a start follows this check, a CAS at the revision of
    `record` fails.
    """
    if record.powered or status is None or status.state is not VmState.STOPPED:
        return False
    asked = record.node, record.epoch, record.power_epoch
    return (status.node, status.epoch, status.power_epoch) == asked


def refuse_running(record: VmRecord, status: VmStatus | None, verb: Verb, disk: Disk) -> None:
    """Raise 409, with a reason, if the VM may run and `verb` needs a VM that is off."""
    if is_off(record, status):
        return
    ability = ABILITIES[disk.bus][verb]
    others = [one for one in record.spec.domain.devices.disks if one.bus is DiskBus.USB]
    why = ability.why if ability.refused else ""
    if disk.bus is DiskBus.USB and verb is Verb.HOT_PLUG and not others:
        why = NO_USB
    if why:
        message = (
            f"no {verb} of {disk.name} while {record.name} runs ({disk.bus}): {why}; "
            f"or `virtbus vm stop {record.name}`, then repeat"
        )
        raise VirtbusError(Code.CONFLICT, "not_off", message)


def _changed(record: VmRecord, volumes: Iterable[Volume], disks: Iterable[Disk]) -> VmRecord:
    """Return the record with these volumes and disks; raise VirtbusError 400 if one is invalid."""
    plain: dict[str, Any] = record.spec.model_dump()
    plain["volumes"] = [one.model_dump() for one in volumes]
    plain["domain"]["devices"]["disks"] = [one.model_dump() for one in disks]
    spec = checked_spec(plain)
    update = {"spec": spec, "spec_hash": spec_hash(spec), "generation": record.generation + 1}
    return record.model_copy(update=update)
