"""Blocking work in threads, which nothing else overtakes."""

import asyncio
import threading

from virtbus.netd.edge.namespaces import in_thread


async def test_a_call_that_is_cancelled_twice_ends_with_its_thread() -> None:
    may_end = threading.Event()
    ended = list[bool]()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(in_thread(lambda: ended.append(may_end.wait(5))))
        for _cancel in range(3):
            await asyncio.sleep(0.01)
            call.cancel()
        await asyncio.sleep(0.01)
        assert not call.done()
        may_end.set()
    assert call.cancelled()
    assert ended == [True]
