"""Wraps the bus of a fleet's node: paces the node, and calls its imaged and netd directly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from virtbus.bus.client.ports import Bus, Entry, Gate, Watch, WatchMark
from virtbus.schemas import subjects
from virtbus.simulator.services import SimulatedNode

EACH_TURN = 4


class LoopTurns:
    """Lets only a few VMs begin or end in each turn of the loop.

    Without this limit, ten thousand VMs would progress at the same pace, and all would finish late.
    Nodes would be too busy to send heartbeats.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(EACH_TURN)

    async def come(self) -> None:
        """Wait for one of the EACH_TURN places in a turn of the loop."""
        async with self._places:
            await asyncio.sleep(0)


class _PacedWatch:
    """A watch whose entries are returned in turns; implements `ports.Watch`."""

    def __init__(self, watch: Watch, turns: LoopTurns) -> None:
        self._watch = watch
        self._turns = turns

    async def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        async for item in self._watch:
            await self._turns.come()
            yield item

    def relist(self) -> None:
        self._watch.relist()


class FleetBus:
    """A node's bus that calls the node's imaged and netd in the same process.

    On one loop, services of hundreds of nodes may answer late. Over the bus, an agent would repeat
    its request before the answer, which adds work without effect.
    """

    def __init__(self, bus: Bus, simulated: SimulatedNode, node: str, turns: LoopTurns) -> None:
        self._bus = bus
        self._turns = turns
        self._answers = {
            subjects.rpc(node, service, verb): answer
            for service in ("imaged", "netd")
            for verb, (_, answer) in simulated.answers_of(service).items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    @asynccontextmanager
    async def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AsyncIterator[_PacedWatch]:
        async with self._bus.node_watch(node, service, gate) as watch:
            yield _PacedWatch(watch, self._turns)

    async def request(
        self, subject: str, value: Any, *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        answer = self._answers.get(subject)
        if answer is not None:
            await self._turns.come()
            return answer(value)
        return await self._bus.request(subject, value, timeout_s=timeout_s, request_id=request_id)
