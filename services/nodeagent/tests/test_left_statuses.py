"""Statuses of a killed agent: each is looked for once, and few are remembered."""

from services.nodeagent.tests.pretended_node import NODE, uid

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.nodeagent.status_gc import LOOKED_KEPT, StatusCollector


async def test_the_memory_of_searched_statuses_is_bounded() -> None:
    left = StatusCollector(MemoryBus(MemoryServer(), "agent"), NODE)
    for number in range(LOOKED_KEPT + 500):
        left.purged(uid(number))
        left.purged(uid(number))
    assert left._queue.qsize() == LOOKED_KEPT + 500
    assert len(left._looked) == LOOKED_KEPT
    assert uid(LOOKED_KEPT + 499) in left._looked
