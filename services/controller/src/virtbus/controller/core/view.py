"""Makes the API view of a VM from its record and its node's last status."""

from collections.abc import Mapping

from virtbus.controller.core.evacuation import fenced
from virtbus.controller.core.nodes import UNCERTAIN, WHY_UNKNOWN
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.vm_states import visible_state
from virtbus.schemas.image import shown_ref
from virtbus.schemas.node import Fence, NodeState
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm import VmRecord, VmSpec, Volume
from virtbus.schemas.vm_status import Condition, VmStatus, VmView


def view(
    record: VmRecord,
    revision: int,
    status: VmStatus | None,
    node: NodeState,
    fence: Fence | None = None,
    unplaced: str = "",
) -> VmView:
    """Return the API view of a VM.

    `revision` is the record's revision, which a client repeats in an update. `fence` proves that
    the VM's node is off; it is None for nodes that are not fenced. `unplaced` says why the VM waits
    for a node.
    """
    seen = status if status is not None and status.epoch >= record.epoch else None
    conditions = seen.conditions if seen else ()
    reason, message = (seen.reason, seen.message) if seen else ("", "")
    if node in UNCERTAIN:
        reason, message = f"node_{node}", WHY_UNKNOWN[node].format(node=record.node)
        if fence is not None:
            reason, message = "node_fenced", fenced(record, fence)
        conditions += (Condition(type="NodeSilent", status=True, reason=reason, message=message),)
    if record.evacuating:
        goal = record.evacuation_target or "another node"
        why = f"leaves {record.node} for {goal}, as soon as that can take it"
        conditions += (Condition(type="Evacuating", status=True, message=why),)
    if unplaced and not record.deleting:
        reason, message = "unplaced", unplaced
        conditions = (
            Condition(
                type="Placed",
                status=False,
                reason=reason,
                message=message,
                since_ns=record.created_ns,
            ),
        )
    if orphaned := record.annotations.get(ORPHANED):
        conditions += (
            Condition(type="Orphaned", status=True, reason="no_owner", message=orphaned),
        )
    return VmView(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        owner=record.owner,
        labels=record.labels,
        annotations=record.annotations,
        node=record.node,
        epoch=record.epoch,
        generation=record.generation,
        revision=revision,
        created_ns=record.created_ns,
        image_targets=record.image_targets,
        state=visible_state(record, status, node),
        reason=reason,
        message=message,
        failure_stage=seen.failure_stage if seen else "",
        deleting=record.deleting,
        powered=record.powered,
        paused=record.powered and record.paused,
        power_observed=seen is not None
        and (seen.power_epoch, seen.pause_epoch) == (record.power_epoch, record.pause_epoch),
        restarts=seen.restarts if seen else 0,
        reboots=seen.reboots if seen else 0,
        rebooted_ns=seen.rebooted_ns if seen else None,
        last_exit=seen.last_exit if seen else None,
        interfaces=seen.interfaces if seen else (),
        conditions=conditions,
        accelerator=seen.accelerator if seen else "",
        image_digest=seen.image_digest if seen else "",
        disk_limits=seen.disk_limits if seen else {},
        resources=seen.resources if seen else None,
        started_ns=seen.started_ns if seen else None,
        observed_generation=seen.generation if seen else 0,
        spec=shown_spec(record.spec),
    )


def shown_spec(spec: VmSpec) -> VmSpec:
    """Return a spec for display, without queries of image URLs. An update restores the queries."""
    for volume in spec.volumes:
        if volume.image is not None and "?" in volume.image.ref:
            shown = tuple(_shown(volume) for volume in spec.volumes)
            return spec.model_copy(update={"volumes": shown})
    return spec


def _shown(volume: Volume) -> Volume:
    if volume.image is None:
        return volume
    image = volume.image.model_copy(update={"ref": shown_ref(volume.image.ref)})
    return volume.model_copy(update={"image": image})


def matches(
    record: VmRecord, namespace: str | None, labels: dict[str, str], owner: str = ""
) -> bool:
    """Return True for a record of the namespace and owner with all the labels.

    None as namespace, or an empty owner, matches every record.
    """
    return (
        (namespace is None or record.namespace == namespace)
        and (not owner or record.owner == owner)
        and all(record.labels.get(key) == value for key, value in labels.items())
    )


def matching_uids(
    vms: Mapping[str, StoredVm], namespace: str | None, labels: dict[str, str], owner: str = ""
) -> list[str]:
    """Return the uids of the matching records, sorted by namespace, name and uid."""
    return [
        held.record.uid
        for held in sorted(vms.values(), key=StoredVm.order)
        if matches(held.record, namespace, labels, owner)
    ]
