"""A create passes through few modules, and each event enters the actor once."""

import asyncio
from pathlib import Path

from services.nodeagent.tests.create_path import Passed, passed
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record

from virtbus.schemas.node import NodeState

MODULES = 10


async def create(tmp_path: Path) -> Passed:
    """Create a VM; return the modules that it passed."""
    node = Node(tmp_path)
    await node.join()

    async def ready() -> bool:
        found = await node.liveness()
        return found is not None and found.state is NodeState.READY

    async with node.agent():
        await eventually(ready)
        with passed() as idle:
            await asyncio.sleep(0.2)
        with passed() as found:
            await node.put(record())
            await eventually(in_state(node, "Running"))
    for module in idle.calls:
        del found.calls[module]
    return found


async def test_a_create_passes_at_most_ten_modules_and_enters_the_actor_once_an_event(
    tmp_path: Path,
) -> None:
    found = await create(tmp_path)
    kinds = {kind: found.of(kind) for kind in ("path", "leaf", "port")}
    assert len(kinds["path"]) <= MODULES, kinds
    assert found.entries == [1, 1, 1], "run, dependencies ready, started"
