"""A list of keys that change while the server sends it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, Watch, WatchMark

pytestmark = pytest.mark.integration

KEYS = [f"$KV.vm.n1.01900000-0000-7000-8000-{n:012}" for n in range(20)]
LISTS = 150


@asynccontextmanager
async def changing(bus: NatsBus) -> AsyncIterator[None]:
    """Change the last keys again and again."""

    async def change() -> None:
        while True:
            for key in KEYS[-5:]:
                await bus.put(key, b"x")

    for key in KEYS:
        await bus.put(key, b"x")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(change())
        yield
        task.cancel()


async def next_list(watch: Watch) -> set[str]:
    """Return the keys of the next list."""
    found: set[str] = set()
    async for item in watch:
        if item is WatchMark.RESET:
            found = set()
        elif isinstance(item, Entry):
            found.add(item.key)
        else:
            break
    return found


async def test_a_list_has_each_key_even_if_the_key_changes_meanwhile(controller: NatsBus) -> None:
    async with changing(controller), controller.watch("$KV.vm.>") as watch:
        for _ in range(LISTS):
            assert await next_list(watch) >= set(KEYS)
            watch.relist()
