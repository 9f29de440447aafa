"""VMs without a record, or on another bus: an agent holds them (ADR 0033)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainState, Ending
from virtbus.nodeagent.vm.status import StatusWriter
from virtbus.schemas import subjects
from virtbus.schemas.node import NodeState
from virtbus.schemas.vm_status import VmStatus

A = uid(1)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, resync_s=0.05, orphan_grace_s=600)


def node_is(node: Node, state: NodeState, words: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        found = await node.liveness()
        return (
            found is not None and found.state is state and words in found.services["agent"].message
        )

    return check


def held(node: Node) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        status = await node.status(A)
        return status is not None and any(c.type == "Held" and c.status for c in status.conditions)

    return check


async def run_once(node: Node) -> None:
    """One VM, started by an agent that has ended since."""
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.done.clear()


async def lose_record(node: Node) -> None:
    """The record is gone without a marker, as after a loss of data."""
    del node.server.shelf("$KV.vm.x").entries[subjects.vm_record(NODE, A)]


async def test_a_stopped_vm_without_a_record_is_reported_and_not_started(node: Node) -> None:
    await run_once(node)
    await lose_record(node)
    node.domains.set(A, DomainState.SHUT_OFF)
    async with node.agent():
        await eventually(node_is(node, NodeState.READY, "1 VM(s) here have no record"))
        await eventually(held(node))
        await asyncio.sleep(0.2)  # several comparisons later it is unchanged
    assert node.domains.done == []
    assert A in await node.files.list()


async def test_a_running_vm_without_a_record_runs_on_and_is_not_started_again_when_it_ends(
    node: Node,
) -> None:
    await run_once(node)
    await lose_record(node)
    async with node.agent():
        await eventually(held(node))
        assert await node.state(A) == "Running"
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(in_state(node, "Preparing"))
        await asyncio.sleep(1.2)  # the first restart would be after 1 s
    assert node.domains.done == []


async def test_a_record_that_returns_resumes_the_vm(node: Node) -> None:
    await run_once(node)
    await lose_record(node)
    node.domains.set(A, DomainState.SHUT_OFF)
    async with node.agent():
        await eventually(held(node))
        await node.put(record())
        await eventually(lambda: node.domains.done == [("start", A)])
        await eventually(node_is(node, NodeState.READY, ""))
        await eventually(in_state(node, "Running"))
        status = await node.status(A)
        assert status is not None
        assert "Held" not in {condition.type for condition in status.conditions}


async def test_a_start_of_a_held_vm_is_not_done_before_it_begins(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    report = StatusWriter.report

    def spy(self: StatusWriter, status: VmStatus) -> None:
        told.append((str(status.state), status.power_epoch))
        report(self, status)

    monkeypatch.setattr(StatusWriter, "report", spy)
    manual = {"run_strategy": "Manual"}
    await node.join()
    await node.put(record(spec=manual))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(in_state(node, "Succeeded"))
        await lose_record(node)
        await eventually(held(node))
        await node.put(record(spec=manual, power_epoch=1))
        await eventually(in_state(node, "Running"))
    assert ("Running", 1) in told
    assert ("Succeeded", 1) not in told


async def test_no_grace_ends_a_vm_without_a_record_and_it_is_counted(node: Node) -> None:
    await run_once(node)
    await lose_record(node)
    node.settings = node.settings.model_copy(update={"orphan_grace_s": 0.1})
    async with node.agent():
        await eventually(held(node))
        await asyncio.sleep(1.0)  # many graces and comparisons later
        assert await node.state(A) == "Running"
        found = await node.liveness()
        assert found is not None
        assert found.held == 1
    assert node.domains.done == []
    assert A in await node.files.list()


async def test_on_another_bus_all_is_held_and_the_agent_reports_ready(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_once(node)
    told: list[str] = []
    monkeypatch.setattr("virtbus.nodeagent.service.notify", told.append)
    node.domains.set(A, DomainState.SHUT_OFF)
    await node.other_bus()
    node.settings = node.settings.model_copy(update={"orphan_grace_s": 0.1})
    async with node.agent():
        await eventually(node_is(node, NodeState.RECOVERING, "1 VM(s) held: this bus is not"))
        await eventually(held(node))
        await asyncio.sleep(0.3)
    assert node.domains.done == []
    assert told == ["READY=1"]
    assert A in await node.files.list()


async def test_records_of_another_bus_neither_start_nor_end_anything(node: Node) -> None:
    await run_once(node)
    await node.other_bus()
    await node.put(record(deleting=True, epoch=2))
    await node.put(record(2))
    async with node.agent():
        await eventually(node_is(node, NodeState.RECOVERING, "2 VM(s) held"))
        await eventually(held(node))
        await node.bus.purge(subjects.vm_record(NODE, A), marker_ttl_s=60)
        await asyncio.sleep(0.2)
        assert await node.state(A) == "Running"
    assert node.domains.done == []


async def test_an_agent_holds_all_vms_on_a_recreated_bus(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await lose_record(node)
        await node.join("bus-2")
        await eventually(node_is(node, NodeState.RECOVERING, "1 VM(s) held"))
        await node.join("bus-1")
        await node.put(record())
        await eventually(node_is(node, NodeState.READY, ""))
    assert node.domains.done == [("start", A)]


async def test_a_list_while_a_vm_without_a_record_is_being_ended_does_not_end_the_agent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_once(node)
    await lose_record(node)
    asked, may_end = asyncio.Event(), asyncio.Event()
    destroy = node.domains.destroy

    async def slowly(of: str, *, forced: bool = False) -> None:
        asked.set()
        await may_end.wait()
        await destroy(of, forced=forced)

    monkeypatch.setattr(node.domains, "destroy", slowly)
    async with node.agent() as agent:
        await eventually(held(node))
        await node.bus.purge(subjects.vm_record(NODE, A), marker_ttl_s=60)
        await eventually(asked.is_set)
        agent.vms.relist()
        await node.start_another()
        may_end.set()
        await eventually(lambda: A not in agent.vms.actors)
        assert A not in await node.files.list()


@pytest.mark.parametrize("state", [DomainState.SHUT_OFF, DomainState.RUNNING])
async def test_a_vm_whose_record_on_the_bus_is_of_an_older_epoch_follows_the_record_on_disk(
    node: Node, state: DomainState
) -> None:
    """The bus was restored from a backup while the agent was down."""
    await node.join()
    await node.put(record(epoch=2))
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.done.clear()
    node.domains.set(A, state)
    await node.put(record(epoch=1))
    started = [("start", A)] if state is DomainState.SHUT_OFF else []
    async with node.agent() as agent:
        await eventually(lambda: A in agent.vms.actors)
        # the status on the bus is still that of the first agent
        await eventually(lambda: agent.vms.actors[A].status().state == "Running")
        await eventually(lambda: node.domains.done == started)
        await eventually(in_state(node, "Running"))
        found = await node.status(A)
        assert found is not None
        assert found.epoch == 2
    assert node.domains.done == started
