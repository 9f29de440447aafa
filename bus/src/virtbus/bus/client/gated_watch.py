"""Adds a gate (`ports.Gate`) to a watch of a MemoryBus. The gate precedes each list."""

import asyncio
from collections.abc import AsyncIterator

from virtbus.bus.client.ports import Entry, Gate, Watch, WatchMark
from virtbus.bus.errors import BusError, DeniedError

RETRY_S = 0.5


class GatedWatch:
    """A `ports.Watch` that delivers a RESET only after the gate has returned."""

    def __init__(self, watch: Watch, gate: Gate) -> None:
        self._watch = watch
        self._items = aiter(watch)
        self._gate = gate

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        return self

    async def __anext__(self) -> Entry | WatchMark:
        item = await anext(self._items)
        if item is WatchMark.RESET:
            await self._pass()
        return item

    def relist(self) -> None:
        self._watch.relist()

    async def _pass(self) -> None:
        while True:
            try:
                await self._gate()
            except DeniedError:
                raise
            except BusError:
                await asyncio.sleep(RETRY_S)
            else:
                return
