"""Decides about moves of volumes between nodes, up to the write that ends one (ADR 0063)."""

from collections.abc import Mapping

from virtbus.controller.core import resting
from virtbus.controller.core.pools import why_not
from virtbus.controller.core.volume_changes import has_data, refuse_deleting
from virtbus.controller.core.volume_holds import ref_of, sized
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import ExportResult, OperationRecord, OperationStatus
from virtbus.schemas.pool import ABILITIES, PoolReport
from virtbus.schemas.volume import FillState, VolumeFill, VolumeMove, VolumeRecord
from virtbus.schemas.volume_ref import FillSource, VolumeRef

MAX_WHY_CHARS = 1000
GIVEN_UP = "it was given up"


def begun(record: VolumeRecord, node: str, export: str, fill: str) -> VolumeRecord:
    """Return the volume with a move to `node`, by two operations with the given ids.

    Raises:
        VirtbusError: 409 `deleting`, `volume_lost`, `volume_not_filled`, `volume_in_use`,
            `volume_moving`; 422 `volume_shared`.
    """
    refuse_deleting(record)
    if not ABILITIES[record.pool_kind].copies:
        message = (
            f"the data of {record.name} is on the server of the pool {record.spec.pool}, which "
            "each of its nodes reads; there is nothing to move"
        )
        raise VirtbusError(Code.UNSUPPORTED, "volume_shared", message)
    move = record.move
    if node == record.node:
        return failed(record, GIVEN_UP) if record.is_moving else record
    if move is not None and record.has_open_move:
        if record.is_moving and move.target == node:
            return record
        what = f"is being moved to {move.target}" if record.is_moving else "has left data behind"
        message = f"{record.name} {what}; repeat when `virtbus volume get` shows no move"
        raise VirtbusError(Code.CONFLICT, "volume_moving", message, after_ms=5000)
    if record.holder:
        message = (
            f"VM {record.holder} holds {record.name} and stays with it; `virtbus volume detach "
            f"{record.name} -n {record.namespace}` frees it, then move it and attach it again"
        )
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    if not has_data(record) and not record.lost:
        return record.model_copy(update={"node": node, "move": None})
    resting.refuse_unready(record, "")
    new = VolumeMove(source=record.node, target=node, export=export, fill=fill)
    return record.model_copy(update={"move": new})


def moved_ref(record: VolumeRecord) -> VolumeRef:
    """Return the description of the volume after the move: a copy that rests on no image."""
    return ref_of(record).model_copy(update={"image": "", "target": None, "copied": True})


def image_name(record: VolumeRecord, move: VolumeMove) -> str:
    """Return the name of the file on the target, until it is the volume's disk."""
    return f"volumes/{record.namespace}/{record.name}-{move.export[-12:]}"


def export_of(record: VolumeRecord, move: VolumeMove, now_ns: int) -> OperationRecord:
    """Return the operation that writes the data to a file on the source."""
    return OperationRecord(
        kind="export",
        id=move.export,
        namespace=record.namespace,
        resource="volume",
        uid=record.uid,
        name=record.name,
        node=move.source,
        owner=record.owner,
        ref=ref_of(record),
        created_ns=now_ns,
    )


def fill_of(
    record: VolumeRecord, move: VolumeMove, file: ExportResult, now_ns: int
) -> OperationRecord:
    """Return the operation that makes the disk on the target."""
    source = FillSource(image=f"{image_name(record, move)}@{file.digest}", moved=True)
    return OperationRecord(
        kind="fill",
        id=move.fill,
        namespace=record.namespace,
        resource="volume",
        uid=record.uid,
        name=record.name,
        node=move.target,
        owner=record.owner,
        ref=moved_ref(record),
        source=source,
        created_ns=now_ns,
    )


def switched(record: VolumeRecord, move: VolumeMove, size_bytes: int) -> VolumeRecord:
    """Return the volume on its target, whose disk is complete and has `size_bytes`."""
    fill = VolumeFill(operation=move.fill, state=FillState.FILLED, source=FillSource(moved=True))
    there = record.model_copy(update={"node": move.target, "fill": fill})
    return sized(there, size_bytes) if size_bytes > record.spec.size else there


def failed(record: VolumeRecord, why: str) -> VolumeRecord:
    """Return the volume after a failure of its move; it stays where it is."""
    if record.move is None:
        return record
    move = record.move.model_copy(update={"failed": why[:MAX_WHY_CHARS]})
    return record.model_copy(update={"move": move})


def cleaned(record: VolumeRecord) -> VolumeRecord:
    """Return the volume once nothing is left on the other node. A failure stays shown."""
    move = record.move
    if move is None or not move.failed:
        return record.model_copy(update={"move": None})
    done = move.model_copy(update={"cleaned": True})
    return record.model_copy(update={"move": done})


def left_on(record: VolumeRecord, move: VolumeMove) -> str:
    """Return the node that has data which does not count: the one that the record does not name."""
    return move.source if record.node == move.target else move.target


def why_failed(status: OperationStatus) -> str:
    """Return the cause of an operation that did not succeed."""
    return status.error.message if status.error is not None else status.message or "cancelled"


def shown(record: VolumeRecord, progress: str) -> str:
    """Return what a user should know of the move; empty for nothing. `progress` is of the copy."""
    move = record.move
    if move is None or record.deleting:
        return ""
    if move.failed:
        return f"the move to {move.target} failed: {move.failed}"
    if record.is_moving:
        return f"moving to {move.target}: {progress}"
    return f"it is on {move.target}; the former data is being removed from {move.source}"


def refuse_pool(record: VolumeRecord, pools: Mapping[str, PoolReport]) -> None:
    """Raise 409 `no_pool` unless the target, with these `pools`, can take the volume."""
    why = why_not(pools, ((record.spec.pool, record.spec.size, ()),))
    there = pools.get(record.spec.pool)
    if there is not None and there.kind is not record.pool_kind:
        why = f"its pool {record.spec.pool} is of the kind {there.kind}"
    if why:
        message = f"the node cannot take {record.name}: {why}; choose another node"
        raise VirtbusError(Code.CONFLICT, "no_pool", message)
