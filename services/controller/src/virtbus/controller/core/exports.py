"""Makes the record of an export of a VM's disk or a volume, or refuses the export (ADR 0048)."""

from virtbus.controller.core import resting
from virtbus.controller.core.pools import no_copies
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.host_paths import of_host
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.operation_api import OperationExport
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import invalid


def refuse_unclear(want: OperationExport) -> None:
    """Raise 400 unless the request names one disk."""
    if (want.vm is None) == (want.volume is None):
        raise invalid((Detail(path="vm", message="give either vm or volume"),))
    if want.disk is not None and want.vm is None:
        raise invalid((Detail(path="disk", message="is for a vm; a volume has only one disk"),))


def of_vm(want: OperationExport, vm: VmRecord, state: VmState) -> dict[str, object]:
    """Return the fields of an export of a VM's disk.

    Raises:
        VirtbusError: the errors of `resting.of_vm`. 404 `no_disk`: the VM does not have the disk.
            422 `no_copies`: virtbus cannot read the disk's volume.
    """
    fields = resting.of_vm(vm, state)
    disk = _disk(want, vm)
    ref = vm.volume_refs.get(disk)
    if ref is not None and not ref.abilities.exports:
        raise no_copies(ref.pool, ref.name if ref.shared else "")
    return {**fields, "disk": disk, "ref": ref}


def _disk(want: OperationExport, vm: VmRecord) -> str:
    disks = [one.name for one in vm.spec.volumes if not one.is_iso and not of_host(one)]
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
        VirtbusError: the errors of `resting.of_volume`. 409 `volume_in_use`: a VM holds the volume.
    """
    fields = resting.of_volume(record, "")
    if record.holder:
        message = f"VM {record.holder} holds the volume {record.name}; stop it, and export its disk"
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    return fields


def refuse_other(there: OperationRecord, wanted: OperationRecord) -> None:
    """Raise 409 if `there`, the operation that has the id, is not the wanted operation."""
    same = {"uid", "resource", "disk", "format", "kind", "source", "snapshot", "restored"}
    same |= {"backup", "since"}
    if there.model_dump(include=same) != wanted.model_dump(include=same):
        message = f"the id {wanted.id} belongs to another operation; leave it out to get a new one"
        raise VirtbusError(Code.CONFLICT, "id_taken", message)
