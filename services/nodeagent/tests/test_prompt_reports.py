"""Each write is made once, and without waiting for the next beat."""

import asyncio
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import (
    HOST,
    NODE,
    Node,
    eventually,
    in_state,
    record,
    uid,
)

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Entry
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeState
from virtbus.schemas.node_rpc import Ensure, NetReady
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import read
from virtbus.simulator.services import SimulatedNode

A = uid(1)


async def test_a_start_is_one_status_even_if_libvirt_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, told = Node(tmp_path), list[VmStatus]()
    await node.join()
    await node.put(record())
    async with node.bus.watch(subjects.vm_status(NODE, A)) as watch, node.agent() as agent:

        async def answers(*_args: object, **_options: object) -> str:
            agent.vms.actors[A].post("started")  # libvirt's own event comes at this moment
            return "Simulated"

        monkeypatch.setattr(SimulatedNode, "answers", answers)
        async with asyncio.timeout(5):
            async for item in watch:
                if isinstance(item, Entry):
                    told.append(read(VmStatus, item.value))
                if told and any(one.type == "Ready" and one.status for one in told[-1].conditions):
                    break
    assert [str(one.state) for one in told] == ["Running"]


async def test_a_restarted_agent_keeps_addresses_in_the_status_until_netd_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
    before = await node.status(A)
    assert before is not None
    assert before.interfaces

    def silent(_node: SimulatedNode, _want: Ensure) -> NetReady:
        raise VirtbusError(Code.UNAVAILABLE, "recovering", "netd has just started")

    monkeypatch.setattr(SimulatedNode, "net", silent)
    async with node.bus.watch(subjects.vm_status(NODE, A)) as watch, node.agent():
        async with asyncio.timeout(5):
            async for item in watch:
                if isinstance(item, Entry):
                    seen = read(VmStatus, item.value)
                    assert seen.interfaces == before.interfaces
                    if seen.updated_ns > before.updated_ns:
                        break


async def test_a_change_during_a_heartbeat_is_reported_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path)

    class Slow(MemoryBus):
        async def put(
            self,
            key: str,
            value: bytes,
            *,
            expect: int | None = None,
            expect_over: str | None = None,
            ttl_s: float | None = None,
        ) -> int:
            await asyncio.sleep(0.05)
            revision = await super().put(
                key, value, expect=expect, expect_over=expect_over, ttl_s=ttl_s
            )
            put.set()
            return revision

    put = asyncio.Event()
    settings = node.settings.model_copy(update={"heartbeat_s": 60.0})
    liveness = Heartbeat(Slow(node.server, "agent"), settings, lambda: HOST)

    async def ready() -> bool:
        found = await node.liveness()
        return found is not None and found.state is NodeState.READY

    async with asyncio.TaskGroup() as group:
        running = group.create_task(liveness.run())
        await asyncio.sleep(0.01)
        assert not put.is_set()
        liveness.report(NodeState.READY)
        await eventually(ready, 2.0)
        running.cancel()
