"""Caches the pools of each node, and decides which nodes can serve a volume (ADR 0060)."""

from collections.abc import Iterable, Mapping

from virtbus.bus.client.owners import node_of
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.ids import UNPLACED, is_id
from virtbus.schemas.pool import ABILITIES, LOCAL, USABLE, NodePools, PoolKind, PoolReport
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.records import read_stored, refuse_foreign
from virtbus.schemas.volume import VolumeRecord, VolumeSource
from virtbus.schemas.volume_ref import VolumeRef

PoolsByName = Mapping[str, PoolReport]
Needs = tuple[tuple[str, int, tuple[str, ...]], ...]
"""The pools that a VM's volumes need: name, bytes of new data, and volume keys. For each of these
volumes, the pool's operator must have assigned storage."""
_NONE: PoolsByName = {}


class KnownPools:
    """The pools that each node reported last."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, PoolReport]] = {}

    def of(self, node: str) -> PoolsByName:
        """Return the pools of a node by name; empty if it has not reported."""
        return self._of.get(node, _NONE)

    def with_pool(self, name: str) -> list[str]:
        return sorted(node for node, pools in self._of.items() if name in pools)

    def names(self) -> list[str]:
        return sorted({name for pools in self._of.values() for name in pools})

    def put(self, key: str, value: bytes) -> str:
        """Store the report at a node's key `_pools`; return the node.

        Raise VirtbusError if the report does not match the key.
        """
        report = read_stored(NodePools, key, value)
        refuse_foreign(key, is_id(report.node) and subjects.node_pools(report.node))
        self._of[report.node] = {one.name: one for one in report.pools}
        return report.node

    def purge(self, key: str) -> str:
        """Process the end of a node's report; return the node."""
        node = key.split(".")[2]
        self._of.pop(node, None)
        return node

    def known(self) -> set[str]:
        """Return the bus keys of all stored reports."""
        return {subjects.node_pools(node) for node in self._of}

    # --- requests ---------------------------------------------------------------------------
    def refuse_new(self, record: VolumeRecord, more_bytes: int) -> None:
        """Raise an error if no node can store `more_bytes` of new data of a volume now.

        Raises:
            VirtbusError: 422 `pool_unknown`: the volume's node does not have the pool. 429
                `pool_full`: the pool refuses the data on the volume's node. For a volume without
                a node, both apply only if they apply to all nodes.
        """
        pool, nodes = record.spec.pool, self.with_pool(record.spec.pool)
        if record.node:
            nodes = [record.node] if record.node in nodes else []
        if pool == LOCAL and not (record.node and nodes):
            return  # the volume's first VM chooses the node, or an older agent reports no pools
        if not nodes:
            raise self._unknown(record)
        reasons = {node: self._of[node][pool].refusal(more_bytes) for node in nodes}
        if all(reasons.values()):
            first = nodes[0]
            raise VirtbusError(
                Code.EXHAUSTED,
                "pool_full",
                f"the pool {pool} of {first} {reasons[first]}",
                details=tuple(
                    Detail(path=f"node/{node}", message=f"its pool {pool} {why}")
                    for node, why in reasons.items()
                ),
                after_ms=10_000,
            )

    def admitted(self, record: VolumeRecord) -> VolumeRecord:
        """Return a new volume with the kind of its pool.

        Raises:
            VirtbusError: 400 `disk_too_large`: the pool's operator assigned less storage than the
                volume's size. 422 `pool_unassigned`: the operator assigned no storage. 422
                `no_copies`: the volume has a source, and virtbus does not write to its pool. The
                errors of `refuse_new` and `_deciding`.
        """
        self.refuse_new(record, record.spec.size)
        pool, key = record.spec.pool, _key(record)
        found = self._deciding(record)
        kind = found[0].kind if found else PoolKind.LOCAL
        if not ABILITIES[kind].assigned:
            return record.model_copy(update={"pool_kind": kind})
        if not any(key in one.assigned for one in found):
            message = (
                f"the pool {pool} has nothing for {key}; its operator assigns it in pools.toml "
                f"(pools.{pool}.volumes)"
            )
            raise VirtbusError(Code.UNSUPPORTED, "pool_unassigned", message)
        rooms = [one.place_bytes[key] for one in found if key in one.place_bytes]
        if rooms and record.spec.size > max(rooms):
            room, size = format_bytes(max(rooms)), format_bytes(record.spec.size)
            message = f"the place of {key} in the pool {pool} has {room}, and the volume {size}"
            detail = Detail(path="spec.size", message=f"is more than {room}")
            raise VirtbusError(Code.INVALID, "disk_too_large", message, details=(detail,))
        if record.spec.source != VolumeSource() and not ABILITIES[kind].copies:
            raise no_copies(pool)
        return record.model_copy(update={"pool_kind": kind})

    def _deciding(self, record: VolumeRecord) -> list[PoolReport]:
        """Return the reports of a new volume's pool that decide about the volume.

        If a container runtime made the volume, the report of its node decides. If not, the first
        node whose pool is a volume group decides. Without such a node, all reports count.

        Raises:
            VirtbusError: 422 `pool_kinds_differ`: one node decides, and another node has a pool
                with this name of another kind. That node would misread the volume's data.
        """
        pool, home = record.spec.pool, node_of(record.owner)
        reports = {node: self._of[node][pool] for node in self.with_pool(pool)}
        groups = (node for node, one in reports.items() if one.kind is PoolKind.LVM)
        decides = home if home in reports else next(groups, None)
        if decides is None:
            return list(reports.values())
        own = reports[decides]
        for node, one in reports.items():
            if one.kind is not own.kind:
                message = (
                    f"the pool {pool} is of the kind {own.kind} on {decides}, and {one.kind} on "
                    f"{node}; give one of them another name in pools.toml"
                )
                raise VirtbusError(Code.UNSUPPORTED, "pool_kinds_differ", message)
        return [own]

    def refuse_attach(self, node: str, record: VolumeRecord) -> None:
        """Raise 409 `volume_elsewhere` if a VM on the node cannot use the volume's pool."""
        if node != UNPLACED and (why := why_not(self.of(node), needs_of((record,)))):
            message = f"{node} {why}; use a volume of a pool that it has"
            raise VirtbusError(Code.CONFLICT, "volume_elsewhere", message)

    def refuse_growth(self, record: VolumeRecord, size_bytes: int) -> None:
        """Raise an error if the volume cannot grow to `size_bytes`.

        Raises:
            VirtbusError: 422 `cannot_grow`: the volume is shared, or its pool has fixed sizes. If
                the volume has data, also the errors of `refuse_new`.
        """
        more_bytes = size_bytes - record.spec.size
        if more_bytes > 0 and record.spec.is_shared:
            message = (
                "a shared volume keeps its size, because no guest learns of a growth by another; "
                "create another volume and copy the files"
            )
            raise VirtbusError(Code.UNSUPPORTED, "cannot_grow", message)
        if more_bytes > 0 and not ABILITIES[record.pool_kind].grow:
            message = (
                f"a volume in a pool of kind {record.pool_kind} has the size that the pool's "
                "operator gave it; create another volume and copy the files"
            )
            raise VirtbusError(Code.UNSUPPORTED, "cannot_grow", message)
        if record.bound and more_bytes > 0:
            self.refuse_new(record, more_bytes)

    def _unknown(self, record: VolumeRecord) -> VirtbusError:
        pool = record.spec.pool
        lacks = f"{record.node} has no pool {pool}" if record.node else f"no node has a pool {pool}"
        others = ", ".join(self.names()) or "none"
        message = f"{lacks}; the pools of the fleet are: {others}; see `virtbus pool list`"
        detail = Detail(path="spec.pool", message=f"{pool} is not known")
        return VirtbusError(Code.UNSUPPORTED, "pool_unknown", message, details=(detail,))


def _key(record: VolumeRecord) -> str:
    return f"{record.namespace}.{record.name}"


def no_copies(pool: str, shared: str = "") -> VirtbusError:
    """Return the error 422 for a copy of a volume that virtbus cannot read or write.

    `shared` is the name of a shared volume. Only the guests know its content.
    """
    if shared:
        message = f"virtbus does not copy the shared volume {shared}; copy its files in a guest"
        return VirtbusError(Code.UNSUPPORTED, "no_copies", message)
    message = (
        f"virtbus does not copy data to or from the pool {pool}: its operator makes "
        "the content; or copy the files in a guest"
    )
    return VirtbusError(Code.UNSUPPORTED, "no_copies", message)


def needs_of(volumes: Iterable[VolumeRecord]) -> Needs:
    """Return the pools that volumes need. The size of a volume without data counts as new data."""
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    for one in volumes:
        new_bytes, keys = found.get(one.spec.pool, (0, ()))
        new_bytes += 0 if one.bound else one.spec.size
        if ABILITIES[one.pool_kind].assigned:
            keys += (_key(one),)
        found[one.spec.pool] = new_bytes, keys
    return tuple((name, *found[name]) for name in sorted(found))


def needs_of_shared(refs: Iterable[VolumeRef]) -> Needs:
    """Return the pools on storage servers that each node of a VM needs for the VM's volumes."""
    found: dict[str, list[str]] = {}
    for ref in refs:
        if ABILITIES[ref.kind].shared:
            found.setdefault(ref.pool, []).append(ref.key)
    return tuple((name, 0, tuple(sorted(found[name]))) for name in sorted(found))


def why_not(pools: PoolsByName, needs: Needs) -> str:
    """Return why a node with these pools cannot serve the volumes now; empty if it can."""
    for name, new_bytes, keys in needs:
        pool = pools.get(name)
        if pool is None:
            if name != LOCAL:
                return f"has no pool {name}"
            continue  # an older agent does not report `local`
        if pool.state not in USABLE:
            return f"has a pool {name} that is {pool.state}: {pool.message}"
        if lacking := [key for key in keys if key not in pool.assigned]:
            return f"has a pool {name} with nothing for {lacking[0]} (pools.toml)"
        if new_bytes and (why := pool.refusal(new_bytes)):
            return f"has a pool {name} that {why}"
    return ""
