"""A paused guest: the record's wish holds over restarts of agent, guest and host."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import Domains, Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import NO_FILES, DomainChange, DomainEvent, DomainState, Ending
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm_status import VmStatus

A = uid(1)


class Held(Domains):
    """libvirt blocks a start before the guest exists."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def start(
        self, of: str, *, paused: bool = False, files: Mapping[str, int] = NO_FILES
    ) -> None:
        self.asked.set()
        await self.go.wait()
        await super().start(of, paused=paused)


class Deaf(Domains):
    """libvirt does not answer the first request to suspend."""

    deaf = True

    async def suspend(self, of: str) -> None:
        if self.deaf:
            self.deaf = False
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_unavailable", "libvirt is away")
        await super().suspend(of)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def status(node: Node) -> VmStatus:
    found = await node.status(A)
    assert found is not None
    return found


def state(node: Node) -> DomainState:
    return node.domains.there[A].state


async def test_pause_and_unpause_stop_and_resume_the_guest(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(record(paused=True, pause_epoch=1))
        await eventually(in_state(node, "Paused"))
        paused = await status(node)
        assert paused.pause_epoch == 1
        why = {one.type: one.reason for one in paused.conditions}
        assert why == {"Ready": "NotRunning", "Paused": "PausedByUser"}
        await node.put(record(pause_epoch=2))
        await eventually(in_state(node, "Running"))
        assert (await status(node)).pause_epoch == 2
    assert [what for what, _ in node.domains.done] == ["start", "suspend", "resume"]


async def test_a_paused_start_brings_a_guest_that_never_ran(node: Node) -> None:
    await node.join()
    await node.put(record(paused=True))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
        await node.start_another()
        assert state(node) is DomainState.PAUSED
        assert (await status(node)).started_ns is not None
        assert ("resume", A) not in node.domains.done


async def test_the_next_agent_finds_a_paused_guest_paused(node: Node) -> None:
    await node.join()
    await node.put(record(paused=True, pause_epoch=1))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
    done = len(node.domains.done)
    async with node.agent():
        await node.start_another()
        assert await node.state(A) == "Paused"
        assert all(of != A for _, of in node.domains.done[done:])


@pytest.mark.parametrize("paused", [True, False])
async def test_requests_made_while_the_agent_was_down_are_executed_when_it_is_back(
    node: Node, paused: bool
) -> None:
    await node.join()
    await node.put(record(paused=not paused, pause_epoch=1))
    async with node.agent():
        await eventually(in_state(node, "Running" if paused else "Paused"))
    await node.put(record(paused=paused, pause_epoch=2))
    async with node.agent():
        await eventually(in_state(node, "Paused" if paused else "Running"))
        assert (state(node) is DomainState.PAUSED) is paused


async def test_a_guest_paused_by_others_stays_paused_until_an_unpause(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.set(A, DomainState.PAUSED)
        node.domains.tell(DomainEvent(A, DomainChange.PAUSED))
        await eventually(in_state(node, "Paused"))
    async with node.agent():
        await node.start_another()
        assert await node.state(A) == "Paused"
        assert ("resume", A) not in node.domains.done
        await node.put(record(pause_epoch=1))
        await eventually(in_state(node, "Running"))


async def test_a_paused_guest_resumed_by_others_is_paused_again(node: Node) -> None:
    await node.join()
    await node.put(record(paused=True, pause_epoch=1))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
        node.domains.set(A, DomainState.RUNNING)
        node.domains.tell(DomainEvent(A, DomainChange.RESUMED))
        await eventually(lambda: ("suspend", A) in node.domains.done)
        await eventually(lambda: state(node) is DomainState.PAUSED)


async def test_a_paused_guest_whose_host_died_is_started_paused(node: Node) -> None:
    await node.join()
    await node.put(record(paused=True, pause_epoch=1))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
    node.domains.set(A, DomainState.SHUT_OFF, Ending.UNKNOWN)
    async with node.agent():
        await eventually(lambda: node.domains.done.count(("start", A)) == 2)
        await eventually(in_state(node, "Paused"))
        assert state(node) is DomainState.PAUSED


async def test_a_paused_guest_is_stopped_and_deleted_without_waiting_for_its_grace(
    node: Node,
) -> None:
    grace = {"termination_grace_s": 3600}
    await node.join()
    await node.put(record(paused=True, pause_epoch=1, spec=grace))
    async with node.agent():
        await eventually(in_state(node, "Paused"))
        await node.put(record(powered=False, power_epoch=1, pause_epoch=1, spec=grace))
        await eventually(in_state(node, "Stopped"))
        assert ("shutdown", A) not in node.domains.done


async def test_a_pause_that_meets_a_start_holds_once_it_has_come(node: Node) -> None:
    await node.join()
    async with node.agent():
        await node.start_another()
        await node.put(record())
        await node.put(record(paused=True, pause_epoch=1))
        await eventually(in_state(node, "Paused"))
        assert (await status(node)).pause_epoch == 1


async def test_an_unpause_during_a_paused_start_resumes_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.domains = domains = Held()
    await node.join()
    await node.put(record(paused=True))
    async with node.agent() as agent:
        await domains.asked.wait()
        await node.put(record(pause_epoch=1))
        await eventually(lambda: agent.vms.actors[A].vm.record.pause_epoch == 1)
        domains.go.set()
        await eventually(in_state(node, "Running"))


async def test_the_agent_after_a_crash_in_a_start_resumes_the_guest(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.domains = domains = Held()
    await node.join()
    await node.put(record(paused=True))
    async with node.agent():
        await domains.asked.wait()
    await node.put(record(pause_epoch=1))
    domains.set(A, DomainState.PAUSED)
    async with node.agent():
        await eventually(in_state(node, "Running"))


async def test_of_consecutive_pauses_the_last_one_wins(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        for epoch in range(1, 8):
            await node.put(record(paused=epoch % 2 == 1, pause_epoch=epoch))
        await eventually(in_state(node, "Paused"))
        await node.put(record(pause_epoch=8))
        await eventually(in_state(node, "Running"))
        assert (await status(node)).pause_epoch == 8
        assert state(node) is DomainState.RUNNING


async def test_a_resolved_problem_is_no_longer_reported(node: Node) -> None:
    node.domains = Deaf()
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(record(paused=True, pause_epoch=1))
        await eventually(in_state(node, "Paused"))

        async def quiet() -> bool:
            return not (await status(node)).message

        await eventually(quiet)
