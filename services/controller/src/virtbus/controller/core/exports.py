"""Makes the record of an export from a VM or a volume, or refuses it (ADR 0048)."""

from virtbus.controller.core.volume_changes import has_data
from virtbus.controller.core.volume_fills import refuse_unfilled
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.operation_api import OperationExport
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import invalid

OFF_STATES = frozenset({VmState.STOPPED, VmState.SUCCEEDED, VmState.FAILED, VmState.STOPPING})
"""States of a VM whose disk may be exported. The export waits for a VM that is stopping."""


def refuse_unclear(want: OperationExport) -> None:
    """Raise 400 unless the request names one disk."""
    if (want.vm is None) == (want.volume is None):
        raise invalid((Detail(path="vm", message="give either vm or volume"),))
    if want.disk is not None and want.vm is None:
        raise invalid((Detail(path="disk", message="is for a vm; a volume has only one disk"),))


def of_vm(want: OperationExport, vm: VmRecord, state: VmState) -> dict[str, object]:
    """Return the fields of an export of a VM's disk.

    Raises:
        VirtbusError: 404 `no_disk`; 409 `unplaced`, `deleting`, `vm_runs`.
    """
    if vm.ending:
        raise VirtbusError(Code.CONFLICT, "deleting", f"{vm.name} is being deleted")
    if vm.node == UNPLACED:
        message = f"{vm.name} has no node yet, so it has no disk"
        raise VirtbusError(Code.CONFLICT, "unplaced", message)
    if state not in OFF_STATES:
        message = f"{vm.name} is {state}; `virtbus vm stop {vm.name}`, then repeat"
        raise VirtbusError(Code.CONFLICT, "vm_runs", message)
    disk = _disk(want, vm)
    return {
        "resource": "vm",
        "uid": vm.uid,
        "name": vm.name,
        "node": vm.node,
        "epoch": vm.epoch,
        "owner": vm.owner,
        "disk": disk,
        "ref": vm.volume_refs.get(disk),
    }


def _disk(want: OperationExport, vm: VmRecord) -> str:
    disks = [one.name for one in vm.spec.volumes if not one.is_iso]
    if want.disk in disks:
        return want.disk
    if want.disk is None and disks:
        return disks[0]
    message = f"{vm.name} has the disks {', '.join(disks) or '(none)'}"
    detail = Detail(path="disk", message="is no disk of the VM")
    raise VirtbusError(Code.NOT_FOUND, "no_disk", message, details=(detail,))


def of_volume(record: VolumeRecord) -> dict[str, object]:
    """Return the fields of an export of a volume.

    Raises:
        VirtbusError: 409 `deleting`, `volume_lost`, `volume_not_filled`, `volume_empty`,
            `volume_in_use`.
    """
    name = record.name
    if record.deleting:
        raise VirtbusError(Code.CONFLICT, "deleting", f"the volume {name} is being deleted")
    if record.lost:
        message = f"the data of the volume {name} was on {record.node}, which is forgotten"
        raise VirtbusError(Code.CONFLICT, "volume_lost", message)
    refuse_unfilled(record)
    if not has_data(record):
        message = f"no VM has used the volume {name}, so it has no data"
        raise VirtbusError(Code.CONFLICT, "volume_empty", message)
    if record.holder:
        message = f"VM {record.holder} holds the volume {name}; stop it, and export its disk"
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    return {
        "resource": "volume",
        "uid": record.uid,
        "name": name,
        "node": record.node,
        "owner": record.owner,
        "ref": ref_of(record),
    }


def refuse_other(there: OperationRecord, wanted: OperationRecord) -> None:
    """Raise 409 if the operation that has the id is another one."""
    same = {"uid", "resource", "disk", "format", "kind", "source"}
    if there.model_dump(include=same) != wanted.model_dump(include=same):
        message = f"the id {wanted.id} belongs to another operation; leave it out to get a new one"
        raise VirtbusError(Code.CONFLICT, "id_taken", message)
