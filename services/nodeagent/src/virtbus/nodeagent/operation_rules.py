"""Decides from the states of VMs if an operation may begin, must wait, or must end (ADR 0048)."""

from collections.abc import Iterable
from typing import NamedTuple

from virtbus.nodeagent.vm.machine import EVACUATING, SETTLED, UP
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.backup import BackedDisk, BackupWork
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.host_paths import of_host
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.volume_ref import VolumeRef

OFF = SETTLED - UP
"""Phases in which no guest runs, starts or ends."""
LEAVING = EVACUATING | {"ending"}
GOING = "its VM is being deleted, or leaves this node"


class Verdict(NamedTuple):
    """The decision on an operation. If all fields are empty, the operation may be carried out.

    `waits` is the reason to wait, `ends` the reason to cancel, and `error` the reason to fail.
    """

    waits: str = ""
    ends: str = ""
    error: ErrorBody | None = None


GO = Verdict()


def before(op: OperationRecord, vms: Iterable[ActorState]) -> Verdict:
    """Return the verdict on an operation that has not begun."""
    vms = list(vms)
    if guest_of(op, vms) is not None:
        return GO
    if not _of_vm(op):
        return _of_volume(_copied(op), vms)
    vm = _found(op, vms)
    if vm is None:
        return _failed("vm_left", f"the VM is not on {op.node} any more; begin again")
    if _leaves(vm):
        return Verdict(ends=GOING)
    if op.kind == "serve" and vm.phase in OFF:
        return _failed("vm_off", f"{vm.record.name} is off, and only a running guest is read")
    return GO if vm.phase in OFF else _busy(op, vm)


def guest_of(op: OperationRecord, vms: Iterable[ActorState]) -> ActorState | None:
    """Return the running VM whose guest takes part in the operation.

    Return None if no guest runs, if the VM leaves the node, or if this kind of operation needs a VM
    that is off.
    """
    for vm in vms:
        of_vm = (vm.record.uid, vm.record.epoch) == _of_vm(op)
        held = {ref.uid for ref in vm.record.volume_refs.values()}
        of_volume = op.resource == "volume" and op.uid in held
        of_volume &= op.kind != "flatten"  # merges a running VM only on a request for the VM
        kinds = {"snapshot", "backup", "serve", "flatten"}
        live = op.kind in kinds and vm.phase in UP and not _leaves(vm)
        if live and (of_vm or of_volume):
            return vm
    return None


def _busy(op: OperationRecord, vm: ActorState) -> Verdict:
    """Return the verdict for a VM that is on, and whose guest cannot take part."""
    name = vm.record.name
    if vm.phase == "new":
        return Verdict(waits="the agent compares host and records")
    if not vm.record.powered:
        return Verdict(waits=f"{name} is being stopped")
    if vm.phase == "backing off":  # the VM's next start may use the disks at any time
        why = vm.observed.message or "its start fails"
        message = f"{name} does not start ({why}); `virtbus vm stop {name}`, then begin again"
        return _failed("vm_fails", message)
    if op.kind in {"backup", "serve"}:
        return Verdict(waits=f"{name} is starting")
    return _failed("vm_runs", f"{name} runs; stop it, then begin again")


def during(op: OperationRecord, vms: Iterable[ActorState]) -> Verdict:
    """Return the verdict on a running operation. A start of the VM waits until its end."""
    if not _of_vm(op):
        return GO
    vm = _found(op, vms)
    return Verdict(ends=GOING) if vm is None or _leaves(vm) else GO


def is_off(op: OperationRecord, vms: Iterable[ActorState]) -> bool:
    """Return True if the operation's VM is off, or has left the node."""
    vm = _found(op, vms)
    return vm is None or vm.phase in OFF


def _leaves(vm: ActorState) -> bool:
    return vm.ends or vm.phase in LEAVING


def _of_vm(op: OperationRecord) -> tuple[str, int] | None:
    """Return the uid and epoch of the VM whose disks an operation uses.

    Return None if the operation uses a volume object, an image or a backup.
    """
    if op.kind == "verify":
        return None
    if op.resource == "vm":
        return op.uid, op.epoch
    source = op.source
    return (source.vm, source.epoch) if source is not None and source.vm is not None else None


def _found(op: OperationRecord, vms: Iterable[ActorState]) -> ActorState | None:
    """Return the VM whose disks an operation uses; None if the VM has left or its epoch differs."""
    wanted = _of_vm(op)
    return next((vm for vm in vms if (vm.record.uid, vm.record.epoch) == wanted), None)


def _copied(op: OperationRecord) -> VolumeRef | None:
    """Return the volume that no guest may use during the operation.

    For a fill, that volume is the source. No guest can use the target before it is filled.
    """
    if op.kind == "fill":
        return op.source.volume if op.source is not None else None
    return op.ref


def _of_volume(ref: VolumeRef | None, vms: Iterable[ActorState]) -> Verdict:
    """Return the verdict on a copy of a volume, or on a restore into it.

    All VMs with the volume must be off.
    """
    for vm in vms:
        used = {one.uid for one in vm.record.volume_refs.values()}
        if ref is None or ref.uid not in used or vm.phase in OFF:
            continue
        if vm.phase == "new" or not vm.record.powered:
            return Verdict(waits=f"{vm.record.name}, which has {ref.name}, is not off yet")
        return _failed("volume_in_use", f"{vm.record.name} uses {ref.name}; stop it first")
    return GO


def snapshot_work(op: OperationRecord, do: str, vms: Iterable[ActorState]) -> SnapshotWork:
    """Return the work of imaged for a snapshot or a restore, with the VM's present disks.

    `may_begin` is True if no guest uses the disks, or if a running guest takes part. imaged needs
    `may_begin` after its restart, because it has lost its locks.
    """
    found = list(vms)
    if op.resource == "volume":
        disks = [SnapshotDisk(name="disk", ref=op.ref)]
    else:
        records = (vm.record for vm in found if vm.record.uid == op.uid)
        disks = [
            SnapshotDisk(name=volume.name, ref=record.volume_refs.get(volume.name))
            for record in records
            for volume in record.spec.volumes
            if not volume.is_iso
        ]
    names = {"id", "resource", "uid", "name", "snapshot", "restored", "layered"}
    fields = op.model_dump(include=names)
    may = before(op, found) == GO
    return SnapshotWork.model_validate(fields | {"do": do, "disks": disks, "may_begin": may})


def flatten_work(op: OperationRecord, do: str, vms: Iterable[ActorState]) -> FlattenWork:
    """Return the work of imaged for a merge, with the VM's present disks that may have layers."""
    found = list(vms)
    disks = [SnapshotDisk(name="disk", ref=op.ref)]
    if op.resource == "vm":
        records = (vm.record for vm in found if vm.record.uid == op.uid)
        disks = [
            SnapshotDisk(name=volume.name, ref=record.volume_refs.get(volume.name))
            for record in records
            for volume in record.spec.volumes
            if not volume.is_iso and not of_host(volume)
        ]
    local = [disk for disk in disks if disk.ref is None or disk.ref.abilities.snapshots]
    may = before(op, found) == GO
    fields = op.model_dump(include={"id", "uid", "name"})
    return FlattenWork.model_validate({**fields, "do": do, "disks": local, "may_begin": may})


def backup_work(op: OperationRecord, do: str, vms: Iterable[ActorState]) -> BackupWork:
    """Return the work of imaged for a backup, with the VM's present disks.

    Leave out read-only disks, CD-ROM drives and seeds.
    """
    found = list(vms)
    names = {"id", "uid", "namespace", "name", "node", "owner", "schedule", "mode", "chain"}
    fields = op.model_dump(include=names) | {"do": do, "may_begin": before(op, found) == GO}
    vm = _found(op, found)
    if vm is not None:
        spec = vm.record.spec
        fixed = {
            disk.name
            for disk in spec.domain.devices.disks
            if disk.readonly or disk.device == "cdrom"
        }
        fields["disks"] = [
            BackedDisk(name=volume.name, ref=vm.record.volume_refs.get(volume.name))
            for volume in spec.volumes
            if not volume.is_iso and volume.name not in fixed
        ]
        fields["spec"] = spec.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    return BackupWork.model_validate(fields)


def _failed(reason: str, message: str) -> Verdict:
    return Verdict(error=VirtbusError(Code.CONFLICT, reason, message).body)
