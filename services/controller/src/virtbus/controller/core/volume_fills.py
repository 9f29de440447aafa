"""Decides about the copy that becomes a new volume's first content (ADR 0053)."""

from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.controller.core import resting
from virtbus.controller.core.placement import Candidate
from virtbus.controller.core.snapshot_changes import ref_of_snapshot, refuse_incomplete
from virtbus.controller.core.volume_changes import refuse_deleting
from virtbus.controller.core.volume_holds import ref_of, sized
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.image import image_key
from virtbus.schemas.node import NodeState
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.volume import FillState, VolumeFill, VolumeRecord
from virtbus.schemas.volume_ref import FillSource
from virtbus.schemas.wire import invalid

MAX_WHY_CHARS = 1000
"""Limit of the failure message in the volume's record. The operation has the complete message."""


def of_image(record: VolumeRecord, node: str, operation: str) -> VolumeRecord:
    """Return a new volume that is being filled with a copy of its image on `node`."""
    source = FillSource(image=record.spec.source.image or "", target=record.target)
    return _filled_by(record, source, node, operation)


def of_volume(
    record: VolumeRecord, source: VolumeRecord, operation: str, running: str
) -> VolumeRecord:
    """Return a new volume that is being filled with a copy of the volume `source`.

    `running` is the VM that holds the source; empty if no VM holds it, or the VM is off.

    Raises:
        VirtbusError: 400: the new volume is smaller than the source. 409 `volume_elsewhere`: the
            source is not on the requested node. The errors of `resting.refuse_unready`.
    """
    resting.refuse_unready(source, running)
    if record.node not in {"", source.node}:
        message = f"the volume {source.name} is on {source.node}; leave {record.node} out"
        raise VirtbusError(Code.CONFLICT, "volume_elsewhere", message)
    size = record.spec.size or source.spec.size
    if size < source.spec.size:
        message = f"is less than {format_bytes(source.spec.size)}, which {source.name} has"
        raise invalid((Detail(path="spec.size", message=message, hint="0 means its size"),))
    spec = record.spec.model_copy(update={"size": size})
    sized = record.model_copy(update={"spec": spec})
    return _filled_by(sized, FillSource(volume=ref_of(source)), source.node, operation)


def of_vm(record: VolumeRecord, disk: Mapping[str, Any], operation: str) -> VolumeRecord:
    """Return a new volume that is being filled with a VM's disk, which `exports.of_vm` describes.

    Raises:
        VirtbusError: 409 `volume_elsewhere`: the VM is not on the requested node.
    """
    if record.node not in {"", disk["node"]}:
        message = f"{disk['name']} is on {disk['node']}; leave {record.node} out"
        raise VirtbusError(Code.CONFLICT, "volume_elsewhere", message)
    source = FillSource(vm=disk["uid"], epoch=disk["epoch"], disk=disk["disk"], volume=disk["ref"])
    return _filled_by(record, source, disk["node"], operation)


def of_backup(record: VolumeRecord, operation: str) -> VolumeRecord:
    """Return a new volume that is being filled from a backup on the requested node.

    Raises:
        VirtbusError: 400: the request names no node.
    """
    if not record.node:
        message = "a volume from a backup needs the node whose directory has the backup"
        raise invalid((Detail(path="node", message=message, hint="`virtbus backup get` shows it"),))
    wanted = record.spec.source
    source = FillSource(backup=wanted.backup or "", disk=wanted.disk or "")
    return _filled_by(record, source, record.node, operation)


def of_snapshot(record: VolumeRecord, snapshot: SnapshotRecord, operation: str) -> VolumeRecord:
    """Return a new volume that is being filled with a disk of a snapshot.

    Raises:
        VirtbusError: 409 `volume_elsewhere`: the snapshot is not on the requested node. The errors
            of `refuse_incomplete`.
    """
    refuse_incomplete(snapshot)
    if record.node not in {"", snapshot.node}:
        message = f"{snapshot.name} is on {snapshot.node}; leave {record.node} out"
        raise VirtbusError(Code.CONFLICT, "volume_elsewhere", message)
    source = FillSource(snapshot=ref_of_snapshot(snapshot), disk=record.spec.source.disk or "")
    return _filled_by(record, source, snapshot.node, operation)


def _filled_by(record: VolumeRecord, source: FillSource, node: str, operation: str) -> VolumeRecord:
    fill = VolumeFill(operation=operation, source=source)
    return record.model_copy(update={"fill": fill, "node": node, "bound": True})


def node_for(nodes: Sequence[Candidate], image: str, size_bytes: int) -> str:
    """Return the node for a copy of an image.

    A node that has the image is preferred. Among equal nodes, the one with the most free space is
    chosen.

    Raises:
        VirtbusError: 429 `no_node`: no node is ready and has room for `size_bytes`.
    """
    keys = {image_key(image), image_key(image.rpartition("@")[2])}
    found = [
        (not node.images.isdisjoint(keys), _spare_bytes(node), node.record.node)
        for node in nodes
        if not node.cordoned and not node.silent and node.record.state is NodeState.READY
        if not node.record.disk_reserve_bytes or _spare_bytes(node) >= size_bytes
    ]
    if not found:
        message = (
            f"no node is ready and has {format_bytes(size_bytes)} of disk free; free some, or name "
            "a node with --node: the copy is refused there if it does not fit"
        )
        raise VirtbusError(Code.EXHAUSTED, "no_node", message, after_ms=10_000)
    return max(found)[2]


def _spare_bytes(node: Candidate) -> int:
    return node.free_disk_bytes - node.record.disk_reserve_bytes


# --- the operation ------------------------------------------------------------------------------
def operation_of(record: VolumeRecord, fill: VolumeFill, now_ns: int) -> OperationRecord:
    """Return the operation that fills a volume. Repeated calls differ only in `created_ns`."""
    return OperationRecord(
        kind="fill",
        id=fill.operation,
        namespace=record.namespace,
        resource="volume",
        uid=record.uid,
        name=record.name,
        node=record.node,
        owner=record.owner,
        ref=ref_of(record),
        source=fill.source,
        created_ns=now_ns,
    )


def again(record: VolumeRecord, operation: str) -> VolumeRecord:
    """Return the volume after its failed copy was started again by the operation `operation`.

    A volume that is being filled is returned unchanged.

    Raises:
        VirtbusError: 409 `deleting`: the volume is being deleted. 409 `volume_lost`: its node was
            forgotten. 409 `not_copied`: its content is no copy. 409 `volume_filled`: its copy is
            complete.
    """
    refuse_deleting(record)
    fill = record.fill
    if record.lost:
        message = f"the data of {record.name} was on {record.node}, which is forgotten; delete it"
        raise VirtbusError(Code.CONFLICT, "volume_lost", message)
    if fill is None:
        message = f"the volume {record.name} has no source that is copied"
        raise VirtbusError(Code.CONFLICT, "not_copied", message)
    if fill.state is FillState.FILLING:
        return record
    if fill.state is FillState.FILLED:
        message = f"the volume {record.name} has its content; create a volume for another copy"
        raise VirtbusError(Code.CONFLICT, "volume_filled", message)
    begun = VolumeFill(operation=operation, source=fill.source)
    return record.model_copy(update={"fill": begun})


def after(record: VolumeRecord, status: OperationStatus) -> VolumeRecord:
    """Return the volume after its fill ended; unchanged if the operation has not ended."""
    fill = record.fill
    if fill is None or fill.state is not FillState.FILLING or not status.ended:
        return record
    if status.phase is not OperationPhase.SUCCEEDED:
        why = status.error.message if status.error else "it was cancelled"
        return failed(record, fill, why)
    done = fill.model_copy(update={"state": FillState.FILLED, "message": ""})
    filled = record.model_copy(update={"fill": done})
    larger = status.virtual_size_bytes > record.spec.size
    return sized(filled, status.virtual_size_bytes) if larger else filled


def failed(record: VolumeRecord, fill: VolumeFill, why: str) -> VolumeRecord:
    """Return the volume after its copy failed."""
    ended = {"state": FillState.FAILED, "message": why[:MAX_WHY_CHARS]}
    return record.model_copy(update={"fill": fill.model_copy(update=ended)})


def progress(record: VolumeRecord, status: OperationStatus | None) -> str:
    """Return the progress or the failure of a volume's copy; empty after success or without one."""
    fill = record.fill
    if fill is None or fill.state is FillState.FILLED:
        return ""
    if fill.state is FillState.FAILED:
        return (
            f"{fill.message}; `virtbus volume fill {record.name} -n {record.namespace}` copies "
            "again, `virtbus volume delete` removes it"
        )
    return of_status(fill.operation, status)


def of_status(operation: str, status: OperationStatus | None) -> str:
    """Return the progress of an operation on a volume, in words."""
    if status is not None and status.ended:
        return f"operation {operation} has ended"
    if status is None or not status.step:
        return f"operation {operation} has not begun to copy"
    done = 100 * status.done_bytes // status.total_bytes if status.total_bytes else 0
    return f"operation {operation}: {status.step}, {min(100, done)} %"
