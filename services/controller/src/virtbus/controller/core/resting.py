"""Describes the disks of a VM that is off, or a volume that no guest uses, for an operation."""

from virtbus.controller.core.volume_changes import has_data
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord

AT_REST = frozenset({VmState.STOPPED, VmState.SUCCEEDED, VmState.FAILED, VmState.STOPPING})
"""States of a VM whose disks may be copied. One that is stopping is waited for."""


def of_vm(vm: VmRecord, state: VmState) -> dict[str, object]:
    """Return the fields of an operation on the disks of a VM.

    Raises:
        VirtbusError: 409 `unplaced`, `deleting`, `vm_runs`.
    """
    if vm.ending:
        raise VirtbusError(Code.CONFLICT, "deleting", f"{vm.name} is being deleted")
    if vm.node == UNPLACED:
        message = f"{vm.name} has no node yet, so it has no disk"
        raise VirtbusError(Code.CONFLICT, "unplaced", message)
    if state not in AT_REST:
        message = f"{vm.name} is {state}; `virtbus vm stop {vm.name}`, then repeat"
        raise VirtbusError(Code.CONFLICT, "vm_runs", message)
    place = {"uid": vm.uid, "name": vm.name, "node": vm.node, "epoch": vm.epoch}
    return {"resource": "vm", "owner": vm.owner, **place}


def of_volume(record: VolumeRecord, holder: VmState | None) -> dict[str, object]:
    """Return the fields of an operation on a volume; `holder` is the state of the VM that holds it.

    Raises:
        VirtbusError: 409 `deleting`, `volume_lost`, `volume_empty`, `volume_in_use`.
    """
    name = record.name
    if record.deleting:
        raise VirtbusError(Code.CONFLICT, "deleting", f"the volume {name} is being deleted")
    if record.lost:
        message = f"the data of the volume {name} was on {record.node}, which is forgotten"
        raise VirtbusError(Code.CONFLICT, "volume_lost", message)
    if not has_data(record):
        message = f"no VM has used the volume {name}, so it has no data"
        raise VirtbusError(Code.CONFLICT, "volume_empty", message)
    if record.holder and holder not in AT_REST:
        message = f"VM {record.holder} uses the volume {name}; stop it, then repeat"
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    place = {"uid": record.uid, "name": name, "node": record.node, "ref": ref_of(record)}
    return {"resource": "volume", "owner": record.owner, **place}
