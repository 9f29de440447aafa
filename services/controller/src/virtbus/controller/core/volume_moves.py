"""Decides about moves of volumes between nodes and pools, from request to end (ADR 0063)."""

from collections.abc import Mapping
from typing import NamedTuple

from virtbus.controller.core import resting
from virtbus.controller.core.pools import why_not
from virtbus.controller.core.volume_changes import has_data, refuse_deleting
from virtbus.controller.core.volume_holds import ref_of, sized
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import ExportResult, OperationRecord, OperationStatus
from virtbus.schemas.pool import ABILITIES, PoolKind, PoolReport
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.volume import FillState, VolumeFill, VolumeMove, VolumeRecord
from virtbus.schemas.volume_ref import FillSource, VolumeRef

MAX_WHY_CHARS = 1000
GIVEN_UP = "it was given up"


class Goal(NamedTuple):
    """A node and a pool for a volume's data: the goal of a move, or where the data is or was."""

    node: str
    pool: str
    kind: PoolKind = PoolKind.LOCAL


def goal_of(
    record: VolumeRecord, node: str, pool: str | None, pools: Mapping[str, PoolReport]
) -> Goal:
    """Return the goal of a request. `pools` are the pools of the goal's node, by name.

    An empty `node` means the volume's present node. None as `pool` means its present pool.
    """
    name = pool or record.spec.pool
    kind = record.pool_kind if name == record.spec.pool else _kind_at(pools, name)
    return Goal(node or record.node, name, kind)


def _kind_at(pools: Mapping[str, PoolReport], name: str) -> PoolKind:
    """Return the kind of a pool; PoolKind.LOCAL if the node does not report the pool."""
    there = pools.get(name)
    return PoolKind.LOCAL if there is None else there.kind


def begun(
    record: VolumeRecord, goal: Goal, export: str, fill: str, *, is_off: bool = False
) -> VolumeRecord:
    """Return the volume with a move to `goal`. `export` and `fill` are the ids of its operations.

    If the volume is already at `goal`, nothing is copied, and a move that is copying its data
    elsewhere is given up as failed. A volume without data and holder gets the goal's node at once.
    A volume whose data is lost, or with a holder and no data, is refused. `is_off` is True if the
    holder is off, and stays off until the move ends.

    Raises:
        VirtbusError: 409 `deleting`: the volume is being deleted. 409 `volume_in_use`: a VM holds
            it, and `is_off` is False. The errors of `_refuse_pools`, `_if_same` and
            `resting.refuse_unready`.
    """
    refuse_deleting(record)
    _refuse_pools(record, goal)
    if goal == place_of(record):
        return failed(record, GIVEN_UP) if record.is_moving else record
    if record.move is not None and record.has_open_move:
        return _if_same(record, record.move, goal)
    if record.holder and not is_off:
        message = f"VM {record.holder} has taken {record.name} meanwhile; repeat the request"
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    if not record.holder and not has_data(record) and not record.lost:
        return record.model_copy(update={"node": goal.node, "move": None})
    resting.refuse_unready(record, "")
    new = VolumeMove(source=record.node, target=goal.node, export=export, fill=fill)
    if goal.pool != record.spec.pool:
        kinds = {"kind": goal.kind, "former_kind": record.pool_kind}
        pools = {"pool": goal.pool, "former_pool": record.spec.pool}
        new = new.model_copy(update=pools | kinds)
    return record.model_copy(update={"move": new})


def place_of(record: VolumeRecord) -> Goal:
    """Return the node and pool of the volume's data."""
    return Goal(record.node, record.spec.pool, record.pool_kind)


def _refuse_pools(record: VolumeRecord, goal: Goal) -> None:
    """Raise an error if the volume cannot be moved, or cannot change to the goal's pool.

    Raises:
        VirtbusError: 422 `volume_shared`: the volume is shared, or its data is on a server that all
            nodes of its pool read. 409 `no_data`: a volume without data would change its pool.
    """
    if record.spec.is_shared:
        message = (
            f"{record.name} is shared, and stays in its place: several guests write to it; make "
            "another volume there, and copy the files in a guest"
        )
        raise VirtbusError(Code.UNSUPPORTED, "volume_shared", message)
    if not ABILITIES[record.pool_kind].copies:
        message = (
            f"the data of {record.name} is on the server of the pool {record.spec.pool}, which "
            "each of its nodes reads; there is nothing to move"
        )
        raise VirtbusError(Code.UNSUPPORTED, "volume_shared", message)
    if goal.pool != record.spec.pool and not has_data(record):
        message = f"{record.name} has no data yet; delete it, and create it in {goal.pool}"
        raise VirtbusError(Code.CONFLICT, "no_data", message)


def _if_same(record: VolumeRecord, move: VolumeMove, goal: Goal) -> VolumeRecord:
    """Return the volume if its data is already being copied to `goal`.

    Raises:
        VirtbusError: 409 `volume_moving`: another move of the volume has not ended.
    """
    if record.is_moving and goal[:2] == (move.target, move.pool or record.spec.pool):
        return record
    what = f"is being moved to {where(move)}" if record.is_moving else "has left data behind"
    message = f"{record.name} {what}; repeat when `virtbus volume get` shows no move"
    raise VirtbusError(Code.CONFLICT, "volume_moving", message, after_ms=5000)


def moved_ref(record: VolumeRecord, move: VolumeMove) -> VolumeRef:
    """Return the volume's reference after the move, which makes a copy that rests on no image."""
    there = {"pool": move.pool or record.spec.pool, "kind": _kind_of(record, move)}
    copied = {"image": "", "target": None, "copied": True}
    return ref_of(record).model_copy(update=there | copied)


def _kind_of(record: VolumeRecord, move: VolumeMove) -> PoolKind:
    """Return the kind of the target's pool."""
    return move.kind if move.pool else record.pool_kind


def image_name(record: VolumeRecord, move: VolumeMove) -> str:
    """Return the image name under which the target keeps the exported file until the fill."""
    return f"volumes/{record.namespace}/{record.name}-{move.export[-12:]}"


def export_of(record: VolumeRecord, move: VolumeMove, now_ns: int) -> OperationRecord:
    """Return the operation that writes the volume's data to a file on the source node."""
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
    """Return the operation that makes the volume's disk from that file, on the target node."""
    source = FillSource(image=f"{image_name(record, move)}@{file.digest}", moved=True)
    return _fill(record, move, source, now_ns)


def fill_here(record: VolumeRecord, move: VolumeMove, now_ns: int) -> OperationRecord:
    """Return the operation that copies the volume's disk to another pool of the same node."""
    source = FillSource(volume=ref_of(record), moved=True)
    return _fill(record, move, source, now_ns)


def _fill(
    record: VolumeRecord, move: VolumeMove, source: FillSource, now_ns: int
) -> OperationRecord:
    return OperationRecord(
        kind="fill",
        id=move.fill,
        namespace=record.namespace,
        resource="volume",
        uid=record.uid,
        name=record.name,
        node=move.target,
        owner=record.owner,
        ref=moved_ref(record, move),
        source=source,
        created_ns=now_ns,
    )


def switched(record: VolumeRecord, move: VolumeMove, size_bytes: int) -> VolumeRecord:
    """Return the volume on the move's target, where its complete disk has `size_bytes`."""
    fill = VolumeFill(operation=move.fill, state=FillState.FILLED, source=FillSource(moved=True))
    spec = record.spec.model_copy(update={"pool": move.pool or record.spec.pool})
    place = {"node": move.target, "spec": spec, "pool_kind": _kind_of(record, move)}
    there = record.model_copy(update=place | {"fill": fill})
    return sized(there, size_bytes) if size_bytes > record.spec.size else there


def failed(record: VolumeRecord, why: str) -> VolumeRecord:
    """Return the volume after its move failed; its node and pool do not change."""
    if record.move is None:
        return record
    move = record.move.model_copy(update={"failed": why[:MAX_WHY_CHARS]})
    return record.model_copy(update={"move": move})


def cleaned(record: VolumeRecord) -> VolumeRecord:
    """Return the volume after the data that its move left behind was removed.

    The record keeps a failed move, marked as cleaned. It does not keep a move that succeeded.
    """
    move = record.move
    if move is None or not move.failed:
        return record.model_copy(update={"move": None})
    done = move.model_copy(update={"cleaned": True})
    return record.model_copy(update={"move": done})


def left_behind(record: VolumeRecord, move: VolumeMove) -> tuple[str, VolumeRef]:
    """Return the node and reference of a move's data that is not the volume's present data."""
    former, here = Goal(move.source, move.former_pool, move.former_kind), place_of(record)
    if not move.pool:
        former = Goal(move.source, record.spec.pool, record.pool_kind)
    new = Goal(move.target, move.pool or record.spec.pool, _kind_of(record, move))
    other = former if here == new else new
    there = {"pool": other.pool, "kind": other.kind}
    return other.node, ref_of(record).model_copy(update=there)


def where(move: VolumeMove) -> str:
    """Return the goal of a move, in words."""
    to = f"the pool {move.pool}" if move.pool else ""
    if move.source == move.target:
        return to
    return f"{to} of {move.target}" if to else move.target


def why_failed(status: OperationStatus) -> str:
    """Return why an operation did not succeed, in words."""
    return status.error.message if status.error is not None else status.message or "cancelled"


def shown(record: VolumeRecord, progress: str) -> str:
    """Return a message on the volume's move; `progress` describes the copy.

    The message is empty if the volume has no move, or is being deleted.
    """
    move = record.move
    if move is None or record.deleting:
        return ""
    if move.failed:
        return f"the move to {where(move)} failed: {move.failed}"
    if record.is_moving:
        return f"moving to {where(move)}: {progress}"
    former = f"the pool {move.former_pool}" if move.source == move.target else move.source
    return f"it is on {where(move)}; the former data is being removed from {former}"


def refuse_pool(record: VolumeRecord, pool: str, pools: Mapping[str, PoolReport]) -> None:
    """Raise 409 `no_pool` unless `pool` can take the volume; `pools` are those of the target."""
    kind, key = _kind_at(pools, pool), f"{record.namespace}.{record.name}"
    why = why_not(pools, ((pool, record.spec.size, (key,) if ABILITIES[kind].assigned else ()),))
    there = pools.get(pool)
    room_bytes = None if there is None else there.place_bytes.get(key)
    if room_bytes is not None and record.spec.size > room_bytes:
        why = f"its place in the pool {pool} has {format_bytes(room_bytes)}"
    if not ABILITIES[kind].copies or (pool == record.spec.pool and kind is not record.pool_kind):
        why = f"its pool {pool} is of the kind {kind}"
    if why:
        message = f"the node cannot take {record.name}: {why}; choose another (`virtbus pool list`)"
        raise VirtbusError(Code.CONFLICT, "no_pool", message)
