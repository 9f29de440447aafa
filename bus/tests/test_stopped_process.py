"""A process that was stopped for a while continues at the same point."""

import asyncio
import time

import pytest

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, Watch, WatchMark
from virtbus.bus.client.watch import SILENCE_S

pytestmark = pytest.mark.integration

KEY = "$KV.vm.n1.01900000-0000-7000-8000-000000000001"


async def test_a_watch_of_a_paused_process_does_not_list_again(
    controller: NatsBus,
) -> None:
    seen: list[Entry | WatchMark] = []
    async with controller.watch("$KV.vm.>") as watch, asyncio.timeout(20):
        async for item in watch:
            if item is WatchMark.SYNCED:
                break
        async with asyncio.TaskGroup() as group:
            group.create_task(_next(watch, seen))
            await asyncio.sleep(0)  # it waits now
            time.sleep(SILENCE_S + 0.5)
            await controller.put(KEY, b"x")
    assert isinstance(seen[0], Entry), seen


async def _next(watch: Watch, seen: list[Entry | WatchMark]) -> None:
    seen.append(await anext(aiter(watch)))
