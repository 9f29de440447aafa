"""Decides about moves of the volumes of a VM that is off, and computes its record (ADR 0087)."""

from collections.abc import Iterable

from virtbus.controller.core.evacuation import bound_to_host
from virtbus.controller.core.operations import StoredOperation
from virtbus.controller.core.volume_attachment import disks_of, is_off, refuse_unplaced
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.core.volume_moves import where
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import EvictionStrategy, VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.volume import VolumeMove, VolumeRecord

STARTED = "its VM was started meanwhile"
LOSABLE = frozenset({EvictionStrategy.NONE, EvictionStrategy.LIVE_MIGRATE_IF_POSSIBLE})
"""Eviction strategies with which a VM may move, and lose the disks of its own."""
CHANGES = frozenset({"snapshot", "restore", "flatten"})
"""Operations on a VM that replace files of its disks."""


def refuse_up(record: VolumeRecord, vm: VmRecord | None, status: VmStatus | None) -> VmRecord:
    """Return the VM that holds a volume; the VM's node must have confirmed that the VM is off.

    Raises:
        VirtbusError: 409 `detaching`: the volume is being detached. 409 `volume_in_use`: the VM is
            not off, or has no record. The errors of `refuse_unplaced`.
    """
    name = record.name
    if vm is None:
        message = (
            f"VM {record.holder} holds {name} and has no record; once no guest of it runs: "
            f"`virtbus volume detach {name} -n {record.namespace} --gone {record.holder}`"
        )
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    refuse_unplaced(vm)
    if disks_of(vm, ref_of(record)) & vm.detaching.keys():
        message = f"{name} is being detached from {vm.name}; repeat after that"
        raise VirtbusError(Code.CONFLICT, "detaching", message, after_ms=1000)
    if not is_off(vm, status):
        waits = " and waits for its node to confirm it" if not vm.powered else ""
        message = (
            f"VM {vm.name} holds {name}, and is not off{waits}; `virtbus vm stop {vm.name} "
            f"-n {vm.namespace}`, or `virtbus volume detach {name} -n {record.namespace}`, then "
            "repeat"
        )
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    return vm


def refuse_leaving(vm: VmRecord) -> None:
    """Raise 409 if something other than a volume keeps the VM on its node.

    Raises:
        VirtbusError: 409 `volumes_stay`: `bound_to_host` gives the reason. 409 `local_disks`: the
            VM has disks of its own, and its eviction strategy does not permit their loss.
    """
    if why := bound_to_host(vm):
        raise VirtbusError(Code.CONFLICT, "volumes_stay", f"{vm.name} stays: {why}")
    disks = vm.spec.local_disks
    if disks and vm.spec.eviction_strategy not in LOSABLE:
        message = (
            f"{vm.name} stays, and its volumes with it: its own disks are on {vm.node} "
            f"({', '.join(disks)}) and do not go along. `virtbus volume create NAME --from-vm "
            f"{vm.name}:{disks[0]}` copies one for another VM, and eviction_strategy None in its "
            "spec gives up what is on them"
        )
        raise VirtbusError(Code.CONFLICT, "local_disks", message)


def refuse_moving(vm: VmRecord, volumes: Iterable[VolumeRecord]) -> None:
    """Raise 409 `volume_moving` if one of the VM's `volumes` is being moved."""
    for one in volumes:
        if one.is_moving and one.move is not None:
            message = (
                f"{one.name}, a volume of {vm.name}, is being moved to {where(one.move)}; repeat "
                f"after that, or `virtbus volume move {one.name} -n {one.namespace} --node "
                f"{one.node} --pool {one.spec.pool}` gives the move up"
            )
            raise VirtbusError(Code.CONFLICT, "volume_moving", message, after_ms=5000)


def refuse_changing(vm: VmRecord, operations: Iterable[StoredOperation]) -> None:
    """Raise 409 `operation_open` if an open operation replaces files of the VM's disks."""
    for one in changing(operations):
        message = (
            f"the {one.record.kind} {one.record.id} of {vm.name} has not ended; "
            f"`virtbus operation watch {one.record.id}`, then repeat"
        )
        raise VirtbusError(Code.CONFLICT, "operation_open", message, after_ms=5000)


def changing(operations: Iterable[StoredOperation]) -> list[StoredOperation]:
    """Return the operations that replace files of the VM's disks."""
    return [one for one in operations if one.record.kind in CHANGES]


def stays_behind(there: VolumeRecord | None, move: VolumeMove, vm: VmRecord) -> str:
    """Return why the volume `there` cannot follow the VM to the target of `move`; empty if it can.

    A VM moves with all of its volumes, or not at all.
    """
    if there is None or there.holder != vm.uid:
        return f"{vm.name} has a volume that it does not hold"
    if there.is_moving and there.move is not None and there.move.target == move.target:
        return ""
    why = there.move.failed if there.move is not None and there.move.failed else "it was attached"
    return f"{there.name}, another volume of {vm.name}, does not go along: {why}"


def with_moved(vm: VmRecord, volumes: Iterable[VolumeRecord]) -> VmRecord:
    """Return the VM's record with the present nodes and pools of the moved `volumes`."""
    new = {ref.folder: ref for ref in map(ref_of, volumes)}
    refs = {name: new.get(ref.folder, ref) for name, ref in vm.volume_refs.items()}
    return vm.model_copy(update={"volume_refs": refs, "generation": vm.generation + 1})
