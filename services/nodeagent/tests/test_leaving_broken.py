"""Kills an agent before or after each of its calls while a VM leaves (ADR 0014).

The next agent continues: the guest is not started again, and nothing of it is left on the host.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record
from services.nodeagent.tests.test_leaving import KEY, A, gone, released

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.schemas import subjects

CALLS = ("get", "put", "purge", "request")


class MortalBus(MemoryBus):
    """A connection whose process is killed at its call number `at`, before it or right after it."""

    def __init__(self, server: MemoryServer, at: int, *, behind: bool) -> None:
        super().__init__(server, "mortal")
        self.armed = False
        self.dead = asyncio.Event()
        self._calls_made = 0
        self._at = at
        self._behind = behind
        self.request = self._mortal(self.request)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._mortal(found) if name in CALLS and name != "request" else found

    def _mortal(self, call: Any) -> Any:
        async def mortal(subject: str, *args: Any, **more: Any) -> Any:
            if not self.armed or subject == subjects.node_record(NODE):
                return await call(subject, *args, **more)
            self._calls_made += 1
            if self._calls_made != self._at:
                return await call(subject, *args, **more)
            if self._behind:
                await call(subject, *args, **more)
            self.dead.set()
            return await asyncio.get_running_loop().create_future()

        return mortal


async def killed_at(tmp: Path, at: int, *, behind: bool) -> bool:
    """One VM leaves; its agent dies at call `at`. Return False if it made fewer."""
    node = Node(tmp, resync_s=0.05, orphan_grace_s=600)
    await node.join()
    await node.put(record())
    bus = MortalBus(node.server, at, behind=behind)

    async def over() -> bool:
        return bus.dead.is_set() or await released(node)()

    async with node.agent(bus):
        await eventually(in_state(node, "Running"))
        await asyncio.sleep(0.05)
        bus.armed = True
        await node.put(record(evacuating=True))
        await eventually(over)
    async with node.agent():
        await eventually(released(node))
        assert node.domains.there == {}
        await node.bus.purge(KEY)
        await eventually(gone(node))
    assert node.domains.done.count(("start", A)) == 1
    assert await node.files.list() == {}
    return bus.dead.is_set()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_an_agent_that_is_killed_at_any_call_leaves_nothing_and_starts_nothing(
    tmp_path: Path, behind: bool
) -> None:
    at = 1
    while await killed_at(tmp_path / str(at), at, behind=behind):
        shutil.rmtree(tmp_path / str(at))
        at += 1
    assert at > 3
