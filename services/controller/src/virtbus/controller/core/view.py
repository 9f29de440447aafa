"""A VM as users see it: the record and the status that its node last wrote, joined."""

from virtbus.schemas.states import VmEvent, VmState, advance
from virtbus.schemas.vm import Condition, VmRecord, VmStatus, VmView


def visible_state(record: VmRecord, status: VmStatus | None, *, silent: bool) -> VmState:
    """The state to show. A delete wins; a silent node makes what it said unknown (I9)."""
    if status is None or status.epoch < record.epoch:
        state = advance(VmState.PENDING, VmEvent.SCHEDULE)
    else:
        state = status.state
    if record.deleting:
        return advance(state, VmEvent.DELETE)
    if record.leaving and state is VmState.DELETING:  # its node lets go of it, for another
        let_go = status is not None and status.released
        state = VmState.PENDING if let_go else VmState.STOPPING
    return advance(state, VmEvent.LOST) if silent else state


def view(record: VmRecord, revision: int, status: VmStatus | None, *, silent: bool) -> VmView:
    """The API's VM. `revision` is the record's, to be given back in an update."""
    seen = status if status is not None and status.epoch >= record.epoch else None
    conditions = seen.conditions if seen else ()
    if silent:
        message = "the node does not answer; the guest may still run"
        conditions += (Condition(type="NodeSilent", status=True, message=message),)
    return VmView(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        labels=record.labels,
        annotations=record.annotations,
        node=record.node,
        epoch=record.epoch,
        generation=record.generation,
        revision=revision,
        created_ns=record.created_ns,
        state=visible_state(record, status, silent=silent),
        reason=seen.reason if seen else "",
        message=seen.message if seen else "",
        deleting=record.deleting,
        powered=record.powered,
        restarts=seen.restarts if seen else 0,
        interfaces=seen.interfaces if seen else (),
        conditions=conditions,
        accelerator=seen.accelerator if seen else "",
        image_digest=seen.image_digest if seen else "",
        started_ns=seen.started_ns if seen else None,
        observed_generation=seen.generation if seen else 0,
        spec=record.spec,
    )
