"""Decides which VMs hold a volume (ADR 0045).

A VM holds a volume from the VM's commit to its end. Only a shared volume can have several holders
at the same time (ADR 0086).
"""

import uuid
from collections.abc import Iterator, Mapping

from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.schemas.disk import UNBUFFERED
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.pool import ABILITIES
from virtbus.schemas.vm import DISK_MIN, VmRecord, VmSpec
from virtbus.schemas.volume import (
    FillState,
    VolumeFill,
    VolumeHold,
    VolumeRecord,
    VolumeSpec,
)
from virtbus.schemas.volume_ref import NamedVolume, VolumeRef
from virtbus.schemas.volume_spec import SHARED_MAX, Access
from virtbus.schemas.wire import invalid, validate

NOWHERE: Mapping[str, object] = {"node": "", "bound": False}
"""The fields of a volume on a storage server while no node uses it."""


def wanted_volumes(spec: VmSpec) -> dict[str, str]:
    """Return the names of the named volumes in a spec, by the names of their disks."""
    return {one.name: one.volume.name for one in spec.volumes if one.volume is not None}


def _named(spec: VmSpec) -> Iterator[NamedVolume]:
    return (one.volume for one in spec.volumes if one.volume is not None)


def uid_of(vm: str, name: str) -> str:
    """Return the uid of the volume `name` that the spec of the VM `vm` makes.

    A repeated create of the VM gets the same uid. So the create makes the volume only once, and
    does not make it again after the volume was deleted.
    """
    return str(uuid.uuid5(uuid.UUID(vm), name))


def ref_of(record: VolumeRecord) -> VolumeRef:
    """Return the reference to a volume, which describes it in the record of its VM."""
    return VolumeRef(
        uid=record.uid,
        namespace=record.namespace,
        name=record.name,
        size_bytes=record.spec.size,
        image="" if record.fill is not None else record.spec.source.image or "",
        target=None if record.fill is not None else record.target,
        copied=record.fill is not None,
        pool=record.spec.pool,
        kind=record.pool_kind,
        shared=record.spec.is_shared,
    )


def _is_same(now: VolumeRef, ref: VolumeRef) -> bool:
    """Return True if a volume's present reference `now` matches the reference in a VM's record.

    A copied volume may be larger than `ref`, because it may have got its size later.
    """
    larger = ref.copied and now.size_bytes > ref.size_bytes
    return now == (ref.model_copy(update={"size_bytes": now.size_bytes}) if larger else ref)


def fill_of(ref: VolumeRef) -> VolumeFill | None:
    """Return the fill of a volume that is restored from its reference; None if it is no copy."""
    return VolumeFill(state=FillState.FILLED) if ref.copied else None


def plain_spec(ref: VolumeRef) -> VolumeSpec:
    """Return the spec of a volume from its reference. A reference does not name a copy's source."""
    size = max(ref.size_bytes, DISK_MIN) if ref.copied else ref.size_bytes
    source = {"image": ref.image or None}
    spec = {"size": size, "pool": ref.pool, "source": source}
    if ref.shared:
        spec["access"] = str(Access.SHARED)
    return validate(VolumeSpec, spec)


def restored(ref: VolumeRef, vm: VmRecord, now_ns: int) -> VolumeRecord:
    """Return the volume that its VM's record describes, to replace one that the bus has lost.

    The VM holds the volume at once, because its guest may run. Labels and protection are lost, so
    the volume usually outlives the VM. A volume on a storage server gets the retention of its
    template, because a delete removes no data there.
    """
    template = next((one.template for one in _named(vm.spec) if one.name == ref.name), None)
    is_made = template is not None and ref.uid == uid_of(vm.uid, ref.name)
    spec = plain_spec(ref)
    if template is not None and is_made and ABILITIES[ref.kind].shared:
        spec = spec.model_copy(update={"retention": template.retention})
    volume = VolumeRecord(
        uid=ref.uid,
        namespace=ref.namespace,
        name=ref.name,
        spec=spec,
        fill=fill_of(ref),
        pool_kind=ref.kind,
        made_for=vm.uid if is_made else "",
        target=ref.target,
        created_ns=now_ns,
        owner=vm.owner,
    )
    return on_node_of(vm, holding(volume, vm, now_ns))


def as_held(record: VolumeRecord, ref: VolumeRef, vm: VmRecord) -> VolumeRecord:
    """Return the volume changed to match `ref`, which is in the newer record of its VM.

    If the bus was restored from a backup, the volume's record may still name the node and pool
    before a move. Data there stays for an audit.
    """
    if record.spec.size < ref.size_bytes:
        record = sized(record, ref.size_bytes)
    here = (record.node, record.spec.pool, record.pool_kind)
    alone = ABILITIES[ref.kind].shared or vm.node == UNPLACED or record.holder != vm.uid
    if alone or here == (vm.node, ref.pool, ref.kind):
        return record
    spec = record.spec.model_copy(update={"pool": ref.pool})
    place = {"node": vm.node, "spec": spec, "pool_kind": ref.kind, "bound": True, "move": None}
    fill = {"fill": fill_of(ref)} if ref.copied else {}
    return record.model_copy(update=place | fill)


def sized(record: VolumeRecord, size_bytes: int) -> VolumeRecord:
    """Return the volume with another size."""
    spec = record.spec.model_copy(update={"size": size_bytes})
    return record.model_copy(update={"spec": spec, "generation": record.generation + 1})


def refuse_hold(there: StoredVolume | None, name: str, namespace: str, vm: str) -> VolumeRecord:
    """Return the volume if the VM with the uid `vm` may hold it.

    Raises:
        VirtbusError: 404 `volume_not_found`: no volume has that name. All others are 409.
            `deleting`: it is being deleted. `volume_lost`: its node was forgotten. `volume_moving`:
            it is being moved. `volume_in_use`: another VM holds it. `too_many_holders`: it is
            shared, and SHARED_MAX other VMs hold it.
    """
    detail = Detail(path=f"volume/{name}", message="cannot be used")
    if there is None:
        message = (
            f"there is no volume named {name} in namespace {namespace}; "
            f"`virtbus volume create {name} --size SIZE` makes it"
        )
        raise VirtbusError(Code.NOT_FOUND, "volume_not_found", message, details=(detail,))
    record = there.record
    if record.deleting:
        message = f"the volume {name} is being deleted; use another"
        raise VirtbusError(Code.CONFLICT, "deleting", message, details=(detail,))
    if record.lost:
        message = f"the data of the volume {name} was on {record.node}, which is forgotten"
        raise VirtbusError(Code.CONFLICT, "volume_lost", message, details=(detail,))
    if record.is_moving:
        message = f"the volume {name} is being moved to another node; repeat after the move"
        raise VirtbusError(Code.CONFLICT, "volume_moving", message, details=(detail,))
    if record.spec.is_shared and vm not in record.holds and len(record.holds) >= SHARED_MAX:
        message = (
            f"{SHARED_MAX} VMs hold the volume {name}, which is the limit; `virtbus volume get "
            f"{name} -n {namespace} -o yaml` lists them; detach it from one"
        )
        raise VirtbusError(Code.CONFLICT, "too_many_holders", message, details=(detail,))
    if not record.spec.is_shared and record.holder not in {"", vm}:
        message = (
            f"VM {record.holder} holds the volume {name}; `virtbus volume detach {name} "
            f"-n {namespace}` frees it, or use another"
        )
        raise VirtbusError(Code.CONFLICT, "volume_in_use", message, details=(detail,))
    return record


def holding(record: VolumeRecord, vm: VmRecord, now_ns: int) -> VolumeRecord:
    """Return the volume with the VM as its holder; a shared volume keeps its other holders."""
    if not record.spec.is_shared:
        since_ns = record.held_since_ns if record.holder == vm.uid else now_ns
        return record.model_copy(update={"holder": vm.uid, "held_since_ns": since_ns})
    before = record.holds.get(vm.uid, VolumeHold(since_ns=now_ns))
    hold = before.model_copy(update={"node": "" if vm.node == UNPLACED else vm.node})
    return _with_holds(record, {**record.holds, vm.uid: hold})


def _with_holds(record: VolumeRecord, holds: Mapping[str, VolumeHold]) -> VolumeRecord:
    """Return a shared volume with the given holders. On a storage server, it has no node."""
    first = next(iter(holds), "")
    update: dict[str, object] = {
        "holds": dict(holds),
        "holder": first,
        "held_since_ns": holds[first].since_ns if first else 0,
    }
    if _on_server(record):
        update |= {"node": "", "bound": any(hold.node for hold in holds.values())}
    return record.model_copy(update=update)


def on_node_of(vm: VmRecord, record: VolumeRecord) -> VolumeRecord:
    """Return the volume on the node of its holder `vm`.

    If the holder has no node, a volume on a storage server loses its node, and any other volume
    keeps its node. A shared volume on a storage server never has a node.
    """
    if _on_server(record) and record.spec.is_shared:
        return record
    if vm.node == UNPLACED:
        return record.model_copy(update=NOWHERE) if _on_server(record) else record
    return record.model_copy(update={"node": vm.node, "bound": True})


def hold_node(record: VolumeRecord, vm: str) -> str:
    """Return the node on which the holder `vm` may use the volume; empty if it has none."""
    if record.lost or not record.bound:
        return ""
    return record.holds[vm].node if vm in record.holds else record.node


def without_node(record: VolumeRecord, node: str) -> VolumeRecord:
    """Return a volume without data on `node`, after that node was forgotten."""
    if not record.spec.is_shared:
        return record.model_copy(update=NOWHERE)
    holds = {
        vm: hold.model_copy(update={"node": "" if hold.node == node else hold.node})
        for vm, hold in record.holds.items()
    }
    there = record.model_copy(update=NOWHERE) if record.node == node else record
    return _with_holds(there, holds)


def refuse_buffered(spec: VmSpec, refs: Mapping[str, VolumeRef]) -> None:
    """Raise 400 if the host would cache the writes to a shared volume.

    Another host, or another QEMU with its own cache, would not see these writes.
    """
    details = tuple(
        Detail(
            path=f"spec.domain.devices.disks[{index}].cache",
            message=f"{disk.cache} keeps writes in a cache, and {refs[disk.name].name} is shared",
            hint="use none or directsync, or leave it out",
        )
        for index, disk in enumerate(spec.domain.devices.disks)
        if disk.name in refs and refs[disk.name].shared and disk.cache not in UNBUFFERED
    )
    if details:
        raise invalid(details)


def held(there: StoredVolume | None, ref: VolumeRef, vm: VmRecord, now_ns: int) -> VolumeRecord:
    """Return the volume `ref` with the VM as its holder, on the VM's node if it has one.

    A volume on a storage server gets the node of its VM, even if it had another node.

    Raises:
        VirtbusError: 503 `contended`: the volume changed after the VM's record was made. 409
            `volume_elsewhere`: its data is on another node than the VM. The errors of
            `refuse_hold`.
    """
    record = refuse_hold(there, ref.name, ref.namespace, vm.uid)
    if not _is_same(ref_of(record), ref):
        message = f"the volume {ref.name} has changed meanwhile; repeat the request"
        raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=200)
    if record.node not in {"", vm.node} and vm.node != UNPLACED and not _on_server(record):
        message = f"the volume {ref.name} is on {record.node}, not on {vm.node}"
        raise VirtbusError(Code.CONFLICT, "volume_elsewhere", message)
    return on_node_of(vm, holding(record, vm, now_ns))


def grown(there: StoredVolume | None, ref: VolumeRef, vm: str) -> VolumeRecord:
    """Return the volume with at least the size in `ref`, which is in its holder's record.

    Raises:
        VirtbusError: 503 `contended`: the VM no longer holds the volume.
    """
    if there is None or there.record.uid != ref.uid or vm not in there.record.holders:
        message = f"the volume {ref.name} has changed meanwhile; repeat the request"
        raise VirtbusError(Code.UNAVAILABLE, "contended", message, after_ms=200)
    record = there.record
    return sized(record, ref.size_bytes) if record.spec.size < ref.size_bytes else record


def freed(
    there: StoredVolume | None, ref: VolumeRef, vm: str, *, ended: bool = False
) -> VolumeRecord | None:
    """Return the volume without the holder `vm`; None if this VM does not hold it.

    `ended` is True if the VM was deleted, and nothing is left of it. A volume that was made for the
    VM and is not retained is then deleted, too.
    """
    if there is None or there.record.uid != ref.uid or vm not in there.record.holders:
        return None
    if there.record.spec.is_shared:
        holds = {uid: hold for uid, hold in there.record.holds.items() if uid != vm}
        return _with_holds(there.record, holds)
    free: dict[str, object] = {"holder": "", "held_since_ns": 0}
    if ended and there.record.ends_with == vm:
        return there.record.model_copy(update=free | {"deleting": True})
    if _on_server(there.record):
        free |= NOWHERE  # the next VM may be on any node that has the pool
    return there.record.model_copy(update=free)


def _on_server(record: VolumeRecord) -> bool:
    """Return True if the volume is in a pool on a storage server, which several nodes reach."""
    return ABILITIES[record.pool_kind].shared
