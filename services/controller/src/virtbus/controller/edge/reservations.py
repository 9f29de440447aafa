"""Writes VM records in batches with reserved capacity, holders of volumes, and group keys.

A strict VM (`VmRecord.reserved`) reserves its CPUs and memory on its node. The node's sum is a key
with the total of these reservations. Records and sums are in the same bucket, so that one atomic
batch compares and sets both. Therefore two controllers cannot both allocate the last capacity of a
node (ADR 0015), and two VMs cannot hold a volume that is not shared (ADR 0045). A group key tells
a node about a security group of its VMs.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from virtbus.bus.client.ports import Bus, Entry, Write
from virtbus.bus.errors import ConflictError, UnavailableError
from virtbus.controller.core.allocations import NOTHING
from virtbus.controller.core.demand import demand_of, demand_of_vm, memory_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.placement import room
from virtbus.controller.edge.cas import MARKER_TTL_S
from virtbus.controller.edge.group_keys import GroupKeys
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import Reserved
from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

ATTEMPTS = 16
"""Limit of attempts. An attempt fails if another VM of the same node was written first."""


class NodeFullError(Exception):
    """The node has no capacity to reserve; nothing was written."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node} {why}")
        self.node = node
        self.why = why


class Reservations:
    """Writes records together with their reservations."""

    def __init__(self, bus: Bus, fleet: Fleet, volumes: VolumeHolders | None = None) -> None:
        self._bus = bus
        self._fleet = fleet
        self._volumes = volumes or VolumeHolders(bus)
        self._groups = GroupKeys(bus, fleet)

    async def write(
        self, before: VmRecord | None, after: VmRecord | None, writes: Sequence[Write]
    ) -> int:
        """Apply `writes`, which turn `before` into `after`, and the sums, holders and group keys.

        All writes are one batch. Return the revision of the last write. A conflict on a sum, a
        volume or a group key is retried; a conflict on the record is raised.

        Raises:
            VirtbusError: the errors of `volume_holds.held`.
            NodeFullError: the node of `after` lacks the capacity for the VM.
            ConflictError: the record has changed.
            BusError: as `Bus.batch`. UnavailableError: too many races were lost.
        """
        nodes = sorted(_nodes(before, after))
        for _ in range(ATTEMPTS):
            sums = [await self._sum(node, before, after) for node in nodes]
            batch = [one for one in sums if one is not None]
            batch += await self._volumes.writes(before, after)
            batch += await self._groups.writes(after)
            try:
                return await self._batch([*batch, *writes])
            except ConflictError:
                if not batch or not await self._moved_on(batch):
                    raise
        msg = "too many writers reserve on these nodes; repeat it"
        raise UnavailableError(msg)

    async def _batch(self, writes: Sequence[Write]) -> int:
        (first, *more) = writes
        if more:
            return await self._bus.batch(writes)
        if first.value is None:
            return await self._bus.purge(
                first.key, expect=first.expect, marker_ttl_s=first.ttl_s, why=first.why
            )
        return await self._bus.put(
            first.key, first.value, expect=first.expect, expect_over=first.expect_over
        )

    async def _moved_on(self, batch: Sequence[Write]) -> bool:
        """Return True if a sum, a volume or a group key of the batch has another revision now."""
        for one in batch:
            entry = await self._bus.get(one.key)
            if (entry.revision if entry is not None else 0) != one.expect:
                return True
        return False

    async def _sum(
        self, node: str, before: VmRecord | None, after: VmRecord | None
    ) -> Write | None:
        """Return the write of the node's new sum; None if the sum does not change."""
        key = subjects.node_reserved(node)
        entry = await self._bus.get(key)
        there = self._read(node, entry)
        now = there
        if before is not None and before.node == node:
            now = _changed(now, before, -1)
        if after is not None and after.node == node:
            now = _changed(now, after, +1)
            if now.vcpus > there.vcpus or now.memory_bytes > there.memory_bytes:
                self._check(now, after)
        if now == there:
            return None
        body = encode(now) if now.vms > 0 else None
        ttl_s = None if body is not None else MARKER_TTL_S
        return Write(key, body, expect=entry.revision if entry is not None else 0, ttl_s=ttl_s)

    def _read(self, node: str, entry: Entry | None) -> Reserved:
        """Return the sum; compute it from the cached records if the bus never had it (a rebuild).

        A purged sum is zero, even if cached VMs on the node have reservations.
        """
        if entry is not None and not entry.value:
            return Reserved(node=node)
        if entry is not None:
            with suppress(VirtbusError):  # an unreadable sum is computed like a missing sum
                return read_stored(Reserved, entry.key, entry.value)
        load = self._fleet.promises.on.get(node, NOTHING)
        return Reserved(
            node=node,
            vms=load.reserved_vms,
            vcpus=load.reserved_vcpus,
            memory_bytes=load.reserved_memory_bytes,
        )

    def _check(self, now: Reserved, record: VmRecord) -> None:
        """Raise NodeFullError if the sum and the unreserved allocations exceed the capacity."""
        if now.node not in self._fleet.nodes:
            return
        load = self._fleet.promises.on.get(now.node, NOTHING)
        own = record.spec.domain.cpu.vcpus, memory_of(record.spec)
        node = self._fleet.candidate(now.node, 0.0)
        node = replace(
            node,
            strict=True,
            vcpus=node.vcpus - load.reserved_vcpus + now.vcpus - own[0],
            memory_bytes=node.memory_bytes - load.reserved_memory_bytes + now.memory_bytes - own[1],
        )
        why = room(demand_of_vm(record), node, disk=False)
        if why is not None:
            raise NodeFullError(now.node, why)


def _nodes(*records: VmRecord | None) -> set[str]:
    """Return the nodes on which the reservations of these records differ."""
    there = {(r.node, demand_of(r.spec)) for r in records if r is not None and r.reserved}
    if len(there) == 1 and all(r is not None for r in records):
        return set()
    return {r.node for r in records if r is not None and r.reserved and r.node != UNPLACED}


def _changed(there: Reserved, record: VmRecord, sign: int) -> Reserved:
    if not record.reserved:
        return there
    return there.model_copy(
        update={
            "vms": max(there.vms + sign, 0),
            "vcpus": max(there.vcpus + sign * record.spec.domain.cpu.vcpus, 0),
            "memory_bytes": max(there.memory_bytes + sign * memory_of(record.spec), 0),
        }
    )
