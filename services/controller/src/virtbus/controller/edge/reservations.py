"""What is reserved on a node for strict VMs: a sum that changes only together with their records.

The sum lies in the same bucket, so one atomic batch compares and sets it beside the record: two
controllers can never both give away the last of a node (design §3 rule 2, ADR 0015).
"""

from collections.abc import Sequence
from dataclasses import replace

from virtbus.bus.ports import Bus, ConflictError, Entry, UnavailableError, Write
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.placement import demand_of, memory_of, room
from virtbus.controller.core.promises import NOTHING
from virtbus.schemas import subjects
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import Reserved
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, read

ATTEMPTS = 16
"""Each lost race is another VM's progress on the same node."""
MARKER_TTL_S = 86_400.0


class NodeFullError(Exception):
    """The node has no room to reserve; nothing was written."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node} {why}")
        self.node = node
        self.why = why


class Reservations:
    """Writes records together with what they reserve. `fleet` knows what the nodes have."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def write(
        self, before: VmRecord | None, after: VmRecord | None, writes: Sequence[Write]
    ) -> int:
        """`writes` that turn `before` into `after`, and the sums with them; the last revision.

        A lost race for a sum is run again; one for the record is the caller's.

        Raises:
            NodeFullError: the node of `after` cannot hold it beside what is promised there.
            ConflictError: the record is not what it was.
            BusError: as `Bus.batch`.
        """
        nodes = sorted(_nodes(before, after))
        for _ in range(ATTEMPTS):
            sums = [await self._sum(node, before, after) for node in nodes]
            batch = [one for one in sums if one is not None]
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

    async def _moved_on(self, sums: Sequence[Write]) -> bool:
        """True when a sum is not what was read: the race was for that."""
        for one in sums:
            entry = await self._bus.get(one.key)
            if (entry.revision if entry is not None else 0) != one.expect:
                return True
        return False

    async def _sum(
        self, node: str, before: VmRecord | None, after: VmRecord | None
    ) -> Write | None:
        """The node's sum without `before` and with `after`; None where it stays."""
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
        """The sum; where there never was one (a bus that was rebuilt), what the records say.

        One that was purged was nothing then, whatever this controller still knows of its VMs.
        """
        if entry is not None:
            return read(Reserved, entry.value) if entry.value else Reserved(node=node)
        load = self._fleet.promises.on.get(node, NOTHING)
        return Reserved(
            node=node,
            vms=load.reserved_vms,
            vcpus=load.reserved_vcpus,
            memory_bytes=load.reserved_memory_bytes,
        )

    def _check(self, now: Reserved, record: VmRecord) -> None:
        """Raise NodeFullError where the sum and what else is promised are more than there is."""
        if now.node not in self._fleet.nodes:
            return
        load = self._fleet.promises.on.get(now.node, NOTHING)
        own = record.spec.domain.cpu.vcpus, memory_of(record.spec)
        node = replace(
            self._fleet.candidate(now.node, 0.0),
            strict=True,
            vcpus=load.vcpus - load.reserved_vcpus + now.vcpus - own[0],
            memory_bytes=load.memory_bytes - load.reserved_memory_bytes + now.memory_bytes - own[1],
        )
        why = room(record.spec, node, disk=False)
        if why is not None:
            raise NodeFullError(now.node, why)


def _nodes(*records: VmRecord | None) -> set[str]:
    """The nodes on which what these records reserve differs."""
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
