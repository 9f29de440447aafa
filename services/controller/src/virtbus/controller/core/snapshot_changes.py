"""Decides about creates, restores and deletes of snapshots, and makes API views (ADR 0054)."""

from collections.abc import Iterable
from typing import Literal

from virtbus.controller.core import named_creates
from virtbus.controller.core.named_creates import CreateStep
from virtbus.controller.core.vm_keys import StoredSnapshot
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.host_paths import of_host
from virtbus.schemas.node_rpc import HeldSnapshot
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.snapshot import SnapshotRecord, SnapshotRef, SnapshotState
from virtbus.schemas.snapshot_api import (
    SnapshotAdopt,
    SnapshotAsk,
    SnapshotCreate,
    SnapshotView,
)
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import invalid

MAX_NAME_CHARS = 63


# --- sources ------------------------------------------------------------------------------
def refuse_unclear(want: SnapshotCreate) -> None:
    """Raise 400 unless the request names either a VM or a volume, and not both."""
    if (want.vm is None) == (want.volume is None):
        raise invalid((Detail(path="vm", message="give either vm or volume"),))


Need = Literal["snapshots", "copied_snapshots", "backups"]


def refuse_pools(refs: Iterable[VolumeRef], need: Need) -> None:
    """Raise 422 if a volume's pool does not have the ability `need`."""
    for ref in refs:
        able = ref.abilities
        if getattr(able, need):
            continue
        what = "backups" if need == "backups" else "such snapshots"
        if ref.shared:
            message = (
                f"the volume {ref.name} is shared, and has no snapshots and no backups; back up "
                "its files in a guest, and detach it for those of the other disks"
            )
            raise VirtbusError(Code.UNSUPPORTED, "no_snapshots", message)
        step = "use those of its storage"
        if able.exports:
            step = f"copy it with `virtbus volume create NAME --from-volume {ref.name}`"
        if able.copied_snapshots:
            step = (
                "stop its VM, and take one without --layered; a new volume restores it "
                "(`virtbus volume create NAME --from-snapshot`)"
            )
        message = f"the volume {ref.name} is in the pool {ref.pool}, which has no {what}; {step}"
        raise VirtbusError(Code.UNSUPPORTED, "no_snapshots", message)


def refuse_devices(spec: VmSpec) -> None:
    """Raise 422 if a VM has devices, files or directories of its node."""
    for one in spec.domain.devices.filesystems:
        message = (
            f"{one.name} is the directory {one.directory} of the node, which has no snapshots and "
            "no backups; back it up on its host, and take the directory from the VM's spec"
        )
        raise VirtbusError(Code.UNSUPPORTED, "no_snapshots", message)
    for volume in spec.volumes:
        if of_host(volume):
            message = (
                f"the disk {volume.name} is a device or a file of the node, of which virtbus makes "
                "no snapshots; use those of its storage"
            )
            raise VirtbusError(Code.UNSUPPORTED, "no_snapshots", message)


def refuse_protected(record: VolumeRecord) -> None:
    """Raise 409 if a restore would replace the data of a protected volume."""
    if record.spec.protected:
        message = (
            f"the volume {record.name} is protected; `virtbus volume update {record.name} "
            f"--no-protected -n {record.namespace}` clears that"
        )
        raise VirtbusError(Code.CONFLICT, "protected", message)


# --- creates ------------------------------------------------------------------------------
def made(
    want: SnapshotAsk | SnapshotCreate,
    uid: str,
    fields: dict[str, object],
    now_ns: int,
    **more: object,
) -> SnapshotRecord:
    """Return the record of a new snapshot; `fields` are the fields of its operation."""
    return SnapshotRecord.model_validate(
        {
            "uid": uid,
            "namespace": want.namespace,
            "name": want.name,
            "resource": fields["resource"],
            "source": fields["name"],
            "source_uid": fields["uid"],
            "node": fields["node"],
            "owner": fields["owner"],
            "created_ns": now_ns,
            **more,
        }
    )


def kept_name(record: SnapshotRecord, uid: str) -> str:
    """Return the name of the snapshot that keeps the disks which a restore replaces."""
    tail = f"-{uid[-8:]}"
    most = MAX_NAME_CHARS - len("before-") - len(tail)
    return f"before-{record.name[:most].rstrip('-')}{tail}"


def ref_of_snapshot(record: SnapshotRecord) -> SnapshotRef:
    """Return the reference to a snapshot for requests to its node."""
    return SnapshotRef(uid=record.uid, namespace=record.namespace, name=record.name)


def operation_of(
    record: SnapshotRecord, fields: dict[str, object], restored: SnapshotRecord | None
) -> OperationRecord:
    """Return the operation that makes the data of the snapshot `record`.

    If `restored` is given, the operation also replaces the source's disks by `restored`. `record`
    then keeps the replaced disks.
    """
    return OperationRecord.model_validate(
        {
            "kind": "snapshot" if restored is None else "restore",
            "id": record.uid,
            "namespace": record.namespace,
            "snapshot": ref_of_snapshot(record),
            "restored": None if restored is None else ref_of_snapshot(restored),
            "created_ns": record.created_ns,
            **fields,
        }
    )


def adopted(want: SnapshotAdopt, held: HeldSnapshot, now_ns: int) -> SnapshotRecord:
    """Return the record of a snapshot that a node has and the bus does not."""
    fields: dict[str, object] = {
        "resource": held.resource,
        "name": held.name,
        "uid": held.uid,
        "node": want.node,
        "owner": "",
    }
    uid = held.folder.rpartition(".")[2]
    return made(want, uid, fields, now_ns, ready=True, size_bytes=held.size_bytes)


def create_step(there: SnapshotRecord | None, ended: str, wanted: SnapshotRecord) -> CreateStep:
    """Return the next step of a create; raise VirtbusError as `named_creates.create_step` does."""
    fields = ("resource", "source_uid", "replaced_by")
    differences = tuple(
        Detail(path=field, message="differs")
        for field in fields
        if there is not None and getattr(there, field) != getattr(wanted, field)
    )
    return named_creates.create_step(there, ended, wanted, "snapshot", differences)


# --- changes ------------------------------------------------------------------------------
def deleting(record: SnapshotRecord) -> SnapshotRecord:
    """Return the snapshot after a delete request; raise VirtbusError 409 if it is protected."""
    if record.protected and not record.deleting:
        message = (
            f"{record.name} is protected; `virtbus snapshot update {record.name} --no-protected "
            f"-n {record.namespace}` clears that"
        )
        raise VirtbusError(Code.CONFLICT, "protected", message)
    return record.model_copy(update={"deleting": True})


def protected(record: SnapshotRecord, wanted: bool | None) -> SnapshotRecord:
    """Return the snapshot after an update; raise VirtbusError 409 if it is being deleted."""
    refuse_deleting(record)
    if wanted in {None, record.protected}:
        return record
    change = {"protected": wanted, "generation": record.generation + 1}
    return record.model_copy(update=change)


def completed(record: SnapshotRecord, status: OperationStatus) -> SnapshotRecord:
    """Return the snapshot after its operation ended: ready, or deleting after a failure."""
    if status.phase is OperationPhase.SUCCEEDED:
        return record.model_copy(update={"ready": True, "size_bytes": status.done_bytes})
    return record.model_copy(update={"deleting": True})


def mended(want: SnapshotAsk, known: SnapshotRecord | None, uid: str) -> SnapshotRecord:
    """Return a record in the state deleting, which replaces an unreadable record.

    `known` is the snapshot's last readable record. If it is None, the snapshot gets the requested
    uid, or `uid` if the request has none. The snapshot's data then stays on its node.

    Raises:
        VirtbusError: the errors of `refuse_other` and `deleting`.
    """
    if known is not None:
        refuse_other(want, known)
        return deleting(known)
    return SnapshotRecord(
        uid=want.uid or uid,
        namespace=want.namespace,
        name=want.name,
        resource="volume",
        source=want.name,
        source_uid=uid,
        node="unknown",
        lost=True,
        deleting=True,
        created_ns=0,
    )


def refuse_deleting(record: SnapshotRecord) -> None:
    """Raise 409 while the snapshot is being deleted."""
    named_creates.refuse_deleting(record, "snapshot")


def refuse_incomplete(record: SnapshotRecord) -> None:
    """Raise 409 unless the snapshot has all of its data."""
    refuse_deleting(record)
    if record.lost:
        message = f"the data of {record.name} was on {record.node}, which is forgotten"
        raise VirtbusError(Code.CONFLICT, "snapshot_lost", message)
    if not record.ready:
        message = f"{record.name} is not complete; `virtbus operation watch {record.uid}` waits"
        raise VirtbusError(Code.CONFLICT, "snapshot_not_ready", message)


def refuse_another(record: SnapshotRecord, uid: object) -> None:
    """Raise 409 if `uid` is not the source's uid: another object now has the source's name."""
    if uid != record.source_uid:
        message = (
            f"{record.name} is of the {record.resource} {record.source_uid}, and {record.source} "
            f"is {uid} now; `--to {record.source}` restores into it nevertheless"
        )
        raise VirtbusError(Code.CONFLICT, "source_gone", message)


def refuse_elsewhere(record: SnapshotRecord, name: str, node: object) -> None:
    """Raise 409 if the VM or volume `name` is on another node than the snapshot's data."""
    if node != record.node:
        message = f"{record.name} is on {record.node}, and {name} is on {node}"
        raise VirtbusError(Code.CONFLICT, "snapshot_elsewhere", message)


def refuse_other(want: SnapshotAsk, record: SnapshotRecord) -> None:
    """Raise 409 if the requested uid is not the uid of the snapshot with the requested name."""
    if want.uid is not None and want.uid != record.uid:
        message = f"{record.name} is the snapshot {record.uid}, not {want.uid}; leave uid out"
        raise VirtbusError(Code.CONFLICT, "not_its_uid", message)


def not_found(want: SnapshotAsk) -> VirtbusError:
    """Return the error 404 for the requested name."""
    message = (
        f"there is no snapshot named {want.name} in namespace {want.namespace}; "
        "`virtbus snapshot list` shows what there is"
    )
    return VirtbusError(Code.NOT_FOUND, "snapshot_not_found", message)


# --- views --------------------------------------------------------------------------------
def state_of(record: SnapshotRecord) -> SnapshotState:
    """Return the state that users see."""
    if record.deleting:
        return SnapshotState.DELETING
    if record.lost:
        return SnapshotState.LOST
    return SnapshotState.READY if record.ready else SnapshotState.CREATING


def shown(held: StoredSnapshot, message: str = "") -> SnapshotView:
    """Return the API view of a snapshot."""
    fields = held.record.model_dump(include=set(SnapshotView.model_fields))
    more = {"state": state_of(held.record), "revision": held.revision, "message": message}
    return SnapshotView.model_validate(fields | more)
