"""Describes the VM or volume whose disks an operation reads, and refuses one that is in use."""

from virtbus.controller.core.pools import no_copies
from virtbus.controller.core.volume_attachment import refuse_unplaced
from virtbus.controller.core.volume_changes import has_data, refuse_deleting
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.volume import FillState, VolumeRecord

OFF_STATES = frozenset({VmState.STOPPED, VmState.SUCCEEDED, VmState.FAILED, VmState.STOPPING})
"""States of a VM whose disks may be copied. The copy of a stopping VM waits until the VM is off."""


UP_STATES = frozenset({VmState.RUNNING, VmState.PAUSED})
"""States of a VM whose running guest can have a snapshot, because its QEMU continues in new files
(ADR 0061)."""


def of_vm(vm: VmRecord, state: VmState, *, live: bool = False) -> dict[str, object]:
    """Return the fields of an operation on a VM's disks. With `live`, the guest may run.

    Raises:
        VirtbusError: 409 `deleting`: the VM is being deleted. 409 `unplaced`: it has no node, or is
            leaving its node. 409 `vm_runs`: it is not in a permitted state. 503 `node_silent`: its
            state is unknown.
    """
    refuse_unplaced(vm)
    refuse_unknown(vm.name, vm.node, state)
    if state not in OFF_STATES and not (live and state in UP_STATES):
        message = f"{vm.name} is {state}; `virtbus vm stop {vm.name}`, then repeat"
        raise VirtbusError(Code.CONFLICT, "vm_runs", message)
    place = {"uid": vm.uid, "name": vm.name, "node": vm.node, "epoch": vm.epoch}
    return {"resource": "vm", "owner": vm.owner, **place}


def refuse_unknown(name: str, node: str, state: VmState) -> None:
    """Raise 503 `node_silent` if it is unknown whether the guest of the VM `name` runs."""
    if state is VmState.UNKNOWN:
        message = f"{name} is {state}: its node {node} does not report now; repeat once it does"
        raise VirtbusError(Code.UNAVAILABLE, "node_silent", message, after_ms=2000)


def of_volume(record: VolumeRecord, running: str) -> dict[str, object]:
    """Return the fields of an operation on a volume; raise the errors of `refuse_unready`."""
    refuse_unready(record, running)
    place = {"uid": record.uid, "name": record.name, "node": record.node, "ref": ref_of(record)}
    return {"resource": "volume", "owner": record.owner, **place}


def running_holder(record: VolumeRecord, holder: VmView | None, *, live: bool = False) -> str:
    """Return the name of the VM that holds a volume, or an empty string if that VM is off.

    With `live`, a VM in one of UP_STATES counts as off. `holder` is the view of the VM. If it is
    None, the result is the uid of the holder, which is empty for a volume without one. The node
    checks the VM's state again.

    Raises:
        VirtbusError: 503 `node_silent`: the holder's state is unknown.
    """
    if holder is None:
        return record.holder
    refuse_unknown(holder.name, holder.node, holder.state)
    free = holder.state in OFF_STATES or (live and holder.state in UP_STATES)
    return "" if free else holder.name


def refuse_unready(record: VolumeRecord, running: str) -> None:
    """Raise an error unless a volume can be copied; `running` comes from `running_holder`.

    Raises:
        VirtbusError: 409 `deleting`: the volume is being deleted. 422 `no_copies`: virtbus does not
            read its data. 409 `volume_lost`: its node was forgotten. 409 `volume_moving`: it is
            being moved. 409 `volume_not_filled`: its first content is not complete. 409
            `volume_empty`: no VM has used it. 409 `volume_in_use`: `running` is not empty.
    """
    refuse_deleting(record)
    name = record.name
    if not record.abilities.exports:
        raise no_copies(record.spec.pool, name if record.spec.is_shared else "")
    if record.lost:
        message = f"the data of the volume {name} was on {record.node}, which is forgotten"
        raise VirtbusError(Code.CONFLICT, "volume_lost", message)
    if record.is_moving:
        message = f"the volume {name} is being moved to another node; repeat after the move"
        raise VirtbusError(Code.CONFLICT, "volume_moving", message)
    if record.fill is not None and record.fill.state is not FillState.FILLED:
        message = (
            f"the volume {name} has no content yet; `virtbus volume get {name} -n "
            f"{record.namespace}` shows the progress of its copy"
        )
        raise VirtbusError(Code.CONFLICT, "volume_not_filled", message)
    if not has_data(record):
        message = f"no VM has used the volume {name}, so it has no data"
        raise VirtbusError(Code.CONFLICT, "volume_empty", message)
    if running:
        message = f"VM {running} uses the volume {name}; `virtbus vm stop {running}`, then repeat"
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
