"""A guest whose end nobody noticed, and a start that was requested since: the start is done."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid
from services.nodeagent.tests.test_host_restart import STRATEGIES, started

from virtbus.nodeagent.core.ports import DomainChange, DomainState, Ending

A = uid(1)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_start_after_an_unnoticed_end_starts_the_guest(
    tmp_path: Path, strategy: str
) -> None:
    node = Node(tmp_path)
    await started(node, strategy)
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.set(A, DomainState.SHUT_OFF, Ending.SHUT_DOWN)
        await node.put(record(1, spec={"run_strategy": strategy}, power_epoch=1))
        await eventually(lambda: node.domains.done == [("start", A)] * 2)
        await eventually(in_state(node, "Running"))


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.PAUSED])
async def test_a_start_of_a_running_guest_is_done_once_libvirt_has_confirmed_it(
    tmp_path: Path, state: DomainState
) -> None:
    node = Node(tmp_path)
    await started(node, "Once")
    async with node.agent() as agent:
        await eventually(in_state(node, "Running"))
        node.domains.set(A, state)
        await node.put(record(1, spec={"run_strategy": "Once"}, power_epoch=1))
        await eventually(lambda: agent.vms.actors[A].status().power_epoch == 1)
        await eventually(in_state(node, state.value.capitalize()))
    assert node.domains.done == [("start", A)]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_start_requested_while_the_agent_was_down_is_executed(
    tmp_path: Path, strategy: str
) -> None:
    node = Node(tmp_path)
    await started(node, strategy)
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.set(A, DomainState.SHUT_OFF, Ending.SHUT_DOWN)
    await node.put(record(1, spec={"run_strategy": strategy}, power_epoch=1))
    async with node.agent():
        await eventually(lambda: node.domains.done == [("start", A)] * 2)
        await eventually(in_state(node, "Running"))


async def test_a_guest_that_ran_is_not_started_again_for_the_same_start(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await started(node, "Once")
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(in_state(node, "Succeeded"))
        await node.put(record(1, spec={"run_strategy": "Once"}, power_epoch=1))
        await eventually(in_state(node, "Running"))
    node.domains.set(A, DomainState.SHUT_OFF, Ending.SHUT_DOWN)
    async with node.agent():
        await eventually(in_state(node, "Succeeded"))
    assert node.domains.done == [("start", A)] * 2


@pytest.mark.parametrize(
    ("strategy", "heard"),
    [
        ("Once", True),
        ("Manual", True),
        ("RerunOnFailure", True),
        ("Once", False),
        ("RerunOnFailure", False),
    ],
)
async def test_the_next_agent_does_not_repeat_the_start_of_a_guest_that_ran(
    tmp_path: Path, strategy: str, heard: bool
) -> None:
    node = Node(tmp_path)
    again = record(1, spec={"run_strategy": strategy}, power_epoch=1)
    await started(node, strategy)
    async with node.agent() as agent:
        await eventually(in_state(node, "Running"))
        await node.put(again)
        await eventually(lambda: agent.vms.actors[A].status().power_epoch == 1)
        await node.start_another()
        if heard:
            node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
            await eventually(in_state(node, "Succeeded"))
    node.domains.set(A, DomainState.SHUT_OFF, Ending.SHUT_DOWN)
    async with node.agent():
        await eventually(in_state(node, "Succeeded"))
        await node.put(record(98))
        await eventually(lambda: ("start", uid(98)) in node.domains.done)
    assert node.domains.done.count(("start", A)) == 1
