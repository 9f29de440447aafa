"""A guest that libvirt has lost runs on: nothing touches it until a person ends it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

VM = uid(1)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, compare_s=0.05)


@asynccontextmanager
async def losing(node: Node, **more: Any) -> AsyncIterator[None]:
    """An agent whose only guest runs, and is lost by libvirt."""
    await node.join()
    await node.put(record(**more))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.lose(VM)
        await eventually(lambda: lost(node))
        yield


async def lost(node: Node) -> bool:
    status = await node.status(VM)
    return status is not None and any(one.type == "GuestLost" for one in status.conditions)


def started(node: Node) -> int:
    return node.domains.done.count(("start", VM))


async def test_it_is_reported_and_never_started_again(node: Node) -> None:
    async with losing(node):
        assert await node.state(VM) == "Running"
        await node.put(record(power_epoch=1, generation=2))
        await node.start_another()
        assert started(node) == 1


async def test_an_agent_that_starts_finds_it(node: Node) -> None:
    async with losing(node):
        pass
    async with node.agent():
        await eventually(lambda: lost(node))
        await node.start_another()
        assert started(node) == 1


async def test_a_delete_leaves_it_alone_until_it_is_forced(node: Node) -> None:
    async with losing(node):
        await node.put(record(deleting=True, generation=2))

        async def refused() -> bool:
            status = await node.status(VM)
            return status is not None and "has lost the guest" in status.message

        await eventually(refused)
        assert await node.state(VM) == "Deleting"
        assert VM in node.simulated.disks
        assert VM not in node.simulated.forced
        await node.put(record(deleting=True, delete_grace_s=0, generation=3))
        await eventually(lambda: VM not in node.simulated.disks)
        assert VM in node.simulated.forced
        assert ("destroy", VM) in node.domains.done


async def test_after_its_end_the_run_strategy_decides(node: Node) -> None:
    async with losing(node, spec={"run_strategy": "Always"}):
        node.domains.there.pop(VM)
        await eventually(lambda: started(node) == 2)
