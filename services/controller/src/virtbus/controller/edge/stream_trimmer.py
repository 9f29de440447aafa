"""Trims events and statuses of nodes that exceed their share of a stream, as a leader task."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.controller.core.stream_shares import LOOK_AT, Excess, excess
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import is_id

log = logging.getLogger(__name__)

LOOK_S, SELDOM_S = 1.0, 4.0
"""Intervals of the check: SELDOM_S while both streams are filled to at most half of LOOK_AT."""
POINTS, AT_ONCE = 50, 4
"""The number of sampled positions in a stream, and of messages read at each position."""
EVENTS, STATUSES = "virtbus.evt", "$KV.st"
"""The subjects that are trimmed. The newest events of a node stay. All its statuses are removed,
because the agent writes each status again with its next change."""


class StreamTrimmer:
    """Trims nodes that exceed their share of the streams of events and statuses."""

    def __init__(self, bus: Bus, events: FleetEvents, nodes: Callable[[], int]) -> None:
        """`nodes` returns the number of nodes."""
        self._bus = bus
        self._events = events
        self._nodes = nodes

    async def run(self, tenure: LeaderTerm) -> None:
        while True:
            fullest = 0.0
            for prefix in (STATUSES, EVENTS):
                try:
                    fullest = max(fullest, await self.look(prefix, tenure))
                except BusError as error:
                    log.debug("shares of %s unknown: %s", prefix, error)
            await asyncio.sleep(LOOK_S if fullest > LOOK_AT / 2 else SELDOM_S)

    async def look(self, prefix: str, tenure: LeaderTerm) -> float:
        """Trim nodes that exceed their share of a stream; return the stream's fill, 0 to 1."""
        extent = await self._bus.extent(f"{prefix}.>")
        fill = extent.bytes / extent.max_bytes if extent.max_bytes > 0 else 0.0
        if fill < LOOK_AT:
            return fill
        sample: list[tuple[str, int]] = []
        span = extent.last - extent.first + 1
        for point in range(POINTS):
            within = int(self._bus.sources.uniform(0, span / POINTS))
            after = extent.first - 1 + point * span // POINTS + within
            found = await self._bus.history(f"{prefix}.>", after=after, limit=AT_ONCE)
            sample += [(one.subject, len(one.body)) for one in found]
        for one in excess(sample, extent.bytes, extent.max_bytes, extent.messages, self._nodes()):
            tenure.check()
            await self._trim(prefix, one)
        return fill

    async def _trim(self, prefix: str, one: Excess) -> None:
        keep = one.keep if prefix == EVENTS else 0
        message = (
            f"it took about {one.bytes >> 20} MiB of {prefix}.>: trimmed to its newest {keep}. If "
            f"its credentials are stolen, `virtbus bus revoke-node {one.node}` makes them void"
        )
        log.error("node %s: %s", one.node, message, extra={"code": "node_floods"})
        await self._bus.trim(f"{prefix}.{one.node}.>", keep=keep)
        if is_id(one.node):  # emit at each trim: a trim may remove the events of earlier trims
            again = self._bus.sources.uuid7()
            self._events.node(EventKind.NODE_TRIMMED, one.node, message, again)
