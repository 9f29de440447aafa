"""Decides about creates, changes and deletes of volumes, and makes their API views (ADR 0045)."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from virtbus.controller.core import named_creates
from virtbus.controller.core.mutations import changed_paths
from virtbus.controller.core.named_creates import CreateStep
from virtbus.controller.core.unreadable import Unreadable
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_holds import fill_of, hold_node, plain_spec
from virtbus.schemas.bounds import VOLUME_ACCEPTED_BYTES
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.pool import ABILITIES
from virtbus.schemas.vm import DISK_MIN
from virtbus.schemas.volume import FillState, Retention, VolumeRecord, VolumeSpec, VolumeState
from virtbus.schemas.volume_api import VolumeAsk, VolumeHolder, VolumeUpdate, VolumeView
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import encode, invalid

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def create_step(there: VolumeRecord | None, ended: str, wanted: VolumeRecord) -> CreateStep:
    """Return the next step of a create; raise VirtbusError as `named_creates.create_step` does."""
    differences = _differences(there, wanted) if there is not None else ()
    return named_creates.create_step(there, ended, wanted, "volume", differences)


def refuse_known_uid(wanted: VolumeRecord, known: StoredVolume | None) -> None:
    """Raise 409 if `known`, a cached volume of another name, has the uid of `wanted`.

    The cache may lag, so the check may miss a volume with this uid. So no code may find a volume's
    data by the uid alone.
    """
    if known is not None:
        message = (
            f"uid {wanted.uid} is the volume {known.record.name}; leave uid out to get a new one"
        )
        raise VirtbusError(Code.CONFLICT, "uid_taken", message)


def _differences(there: VolumeRecord, wanted: VolumeRecord) -> tuple[Detail, ...]:
    before, after = (one.spec.model_dump(mode="json") for one in (there, wanted))
    if not wanted.spec.size:  # a size of 0 asks for the source's size, which `there` has
        after["size"] = before["size"]
    paths = [*changed_paths(before, after, "spec")]
    if wanted.node not in {"", there.node}:
        paths.append("node")
    return tuple(Detail(path=path, message="differs") for path in paths)


def updated(record: VolumeRecord, want: VolumeUpdate) -> VolumeRecord:
    """Return the volume with the changes of a request.

    Raises:
        VirtbusError: 400: the volume would shrink, or cannot have the retention. 409 `deleting`:
            it is being deleted. 409 `volume_in_use`: it would grow, and a VM holds it. Growth would
            have to change the VM's record in the same batch.
    """
    refuse_deleting(record)
    spec = record.spec
    if want.size is not None and want.size != spec.size:
        spec = spec.model_copy(update={"size": _grown(record, want.size)})
    if want.protected is not None:
        spec = spec.model_copy(update={"protected": want.protected})
    if want.retention is not None:
        spec = spec.model_copy(update={"retention": want.retention})
        refuse_made_for_none(record.model_copy(update={"spec": spec}))
        _refuse_end_of_shared(spec)
    labels = record.labels if want.labels is None else dict(want.labels)
    if spec == record.spec and labels == record.labels:
        return record
    generation = record.generation + (spec != record.spec)
    return record.model_copy(update={"spec": spec, "labels": labels, "generation": generation})


def refuse_made_for_none(record: VolumeRecord) -> None:
    """Raise 400 if the volume should be deleted with its VM, but no VM's spec made it."""
    if record.spec.retention is Retention.DELETE and not record.made_for:
        message = "is only for volumes that a VM's spec makes: no VM's delete would remove it"
        hint = "leave it out; `virtbus volume delete` removes the volume"
        raise invalid((Detail(path="spec.retention", message=message, hint=hint),))


def _refuse_end_of_shared(spec: VolumeSpec) -> None:
    """Raise 400 if a shared volume should be deleted with one of its VMs."""
    if spec.is_shared and spec.retention is Retention.DELETE:
        message = "a shared volume has no VM that it ends with"
        hint = "leave it out; `virtbus volume delete` removes the volume"
        raise invalid((Detail(path="retention", message=message, hint=hint),))


def refuse_shrink(record: VolumeRecord, size_bytes: int) -> None:
    """Raise 400 if the requested size is less than the volume's size."""
    if size_bytes < record.spec.size:
        message = f"is less than {record.spec.size} bytes: a volume never shrinks"
        hint = "create a smaller volume and copy the files"
        raise invalid((Detail(path="size", message=message, hint=hint),))


def _grown(record: VolumeRecord, size_bytes: int) -> int:
    refuse_shrink(record, size_bytes)
    if record.holder:
        raise _in_use(record)
    return size_bytes


def deleting(record: VolumeRecord) -> VolumeRecord:
    """Return the volume after a delete request.

    Raises:
        VirtbusError: 409 `volume_in_use`: a VM holds it. 409 `protected`: it is protected.
    """
    if record.deleting:
        return record
    if record.holder:
        raise _in_use(record)
    if record.spec.protected:
        message = (
            f"{record.name} is protected; `virtbus volume update {record.name} --no-protected "
            f"-n {record.namespace}` clears that"
        )
        raise VirtbusError(Code.CONFLICT, "protected", message)
    return record.model_copy(update={"deleting": True})


def held_by(record: VolumeRecord, names: Mapping[str, str] = NO_NAMES) -> str:
    """Return "VM x holds" or "VMs x, y hold"; the holders are their names, or uids if unknown."""
    first, *more = [names.get(uid, uid) for uid in record.holders]
    return f"VMs {', '.join((first, *more))} hold" if more else f"VM {first} holds"


def _in_use(record: VolumeRecord) -> VirtbusError:
    """Return the error 409 with the holders."""
    several = len(record.holders) > 1
    of, step = (" VM", "takes it from one of them") if several else ("", "frees it")
    who = "; `virtbus volume list` shows their names" if several else ""
    message = (
        f"{held_by(record)} {record.name}{who}; `virtbus volume detach {record.name}{of} "
        f"-n {record.namespace}` {step}, then repeat"
    )
    return VirtbusError(Code.CONFLICT, "volume_in_use", message)


def mended(
    want: VolumeAsk, known: VolumeRecord | None, users: Sequence[str], uid: str
) -> VolumeRecord:
    """Return a record in the state deleting, which replaces an unreadable record.

    `known` is the volume's last readable record. If it is None, the volume gets the requested uid,
    or `uid` if the request has none. The volume's data then stays on its node. `users` are the VMs
    that name the volume.

    Raises:
        VirtbusError: 409 `volume_in_use`: a VM names the volume or holds it. The errors of
            `deleting` and `refuse_other`.
    """
    if users:
        message = f"VM {users[0]} has the volume {want.name}; delete the VM first, then the volume"
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
    if known is not None:
        refuse_other(want, known)
        if known.holder:
            message = (
                f"{held_by(known)} {want.name}, whose record cannot be read; once no guest of "
                f"VM {known.holder} runs: `virtbus volume detach {want.name} -n {want.namespace} "
                f"--gone {known.holder}`"
            )
            raise VirtbusError(Code.CONFLICT, "volume_in_use", message)
        return deleting(known)
    return VolumeRecord(
        uid=want.uid or uid,
        namespace=want.namespace,
        name=want.name,
        spec=VolumeSpec(size=DISK_MIN),
        created_ns=0,
        deleting=True,
    )


def adopted(ref: VolumeRef, node: str, now_ns: int) -> VolumeRecord:
    """Return the record of a volume whose data is on `node`, from the node's copy of its reference.

    Raises:
        VirtbusError: 400: the copy describes no valid volume.
    """
    return VolumeRecord(
        uid=ref.uid,
        namespace=ref.namespace,
        name=ref.name,
        spec=plain_spec(ref),
        pool_kind=ref.kind,
        node=node,
        bound=True,
        fill=fill_of(ref),
        target=ref.target,
        created_ns=now_ns,
    )


def has_data(record: VolumeRecord) -> bool:
    """Return True if a guest or a copy may have written to the volume, and its data is not lost."""
    return record.bound and not record.lost


def has_data_on_node(record: VolumeRecord) -> bool:
    """Return True if a node may have the volume's data; a storage server's data is on no node."""
    return has_data(record) and not ABILITIES[record.pool_kind].shared


def refuse_deleting(record: VolumeRecord) -> None:
    """Raise 409 while the volume is being deleted."""
    named_creates.refuse_deleting(record, "volume")


def refuse_large(record: VolumeRecord) -> None:
    """Raise 413 if the volume's record is larger than users may send."""
    size = len(encode(record))
    if size > VOLUME_ACCEPTED_BYTES:
        parts = {"labels": record.labels, "spec.source.image": record.spec.source.image or ""}
        path = max(parts, key=lambda one: len(encode(parts[one])))
        message = f"the volume would have {size} bytes; at most {VOLUME_ACCEPTED_BYTES} are stored"
        detail = Detail(path=path, message="is the largest part", hint="shorten it")
        raise VirtbusError(Code.TOO_LARGE, "too_large", message, details=(detail,))


def refuse_other(want: VolumeAsk, record: VolumeRecord) -> None:
    """Raise 409 if the requested uid is not the uid of the volume with the requested name."""
    named_creates.refuse_other(want.uid, record, "volume")


def not_found(want: VolumeAsk) -> VirtbusError:
    """Return the error 404 for the requested name."""
    message = (
        f"there is no volume named {want.name} in namespace {want.namespace}; "
        "`virtbus volume list` shows what there is"
    )
    return VirtbusError(Code.NOT_FOUND, "volume_not_found", message)


def state_of(record: VolumeRecord, *, leaving: bool = False) -> VolumeState:
    """Return the state for users; `leaving` is True while a holder detaches the volume."""
    if record.deleting:
        return VolumeState.DELETING
    if record.lost:
        return VolumeState.LOST
    if record.fill is not None and record.fill.state is not FillState.FILLED:
        failed = record.fill.state is FillState.FAILED
        return VolumeState.FILL_FAILED if failed else VolumeState.FILLING
    if record.is_moving:
        return VolumeState.MOVING
    if record.holder:
        return VolumeState.DETACHING if leaving else VolumeState.IN_USE
    return VolumeState.BOUND if record.bound else VolumeState.AVAILABLE


def hold_remains(record: VolumeRecord, vm: str, unreadable: Iterable[Unreadable]) -> str:
    """Return why a VM without a readable record still holds the volume, and the next step."""
    for one in unreadable:
        return f"VM {vm} holds it, and its {one.kind} cannot be read: {one.way_out}"
    return (
        f"VM {vm} holds it and has no record; the hold ends when "
        f"{hold_node(record, vm) or 'a controller'} has confirmed that nothing is left of that VM. "
        "If it cannot, and no guest of it runs: `virtbus volume detach "
        f"{record.name} -n {record.namespace} --gone {vm}`"
    )


def shown(
    held: StoredVolume, holders: Sequence[VolumeHolder] = (), message: str = ""
) -> VolumeView:
    """Return the API view of a volume with its `holders`."""
    leaving = any(one.detaching for one in holders)
    record, state = held.record, state_of(held.record, leaving=leaving)
    return VolumeView(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        owner=record.owner,
        labels=record.labels,
        spec=record.spec,
        state=state,
        message=message,
        node=record.node,
        holder=record.holder,
        holder_name=holders[0].name if holders else "",
        held_since_ns=record.held_since_ns,
        holders=tuple(holders),
        made_for=record.made_for,
        fill_operation=_open_fill(record),
        moving_to=record.move.target if state is VolumeState.MOVING and record.move else "",
        deleting=record.deleting,
        generation=record.generation,
        revision=held.revision,
        created_ns=record.created_ns,
    )


def _open_fill(record: VolumeRecord) -> str:
    """Return the operation that fills the volume, or that failed to; empty if it is filled."""
    fill = record.fill
    return "" if fill is None or fill.state is FillState.FILLED else fill.operation
