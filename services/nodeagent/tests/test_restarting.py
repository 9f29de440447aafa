"""A restart acts once, for any repeats of its record and any crash during it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Domains, Node, eventually, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainState, Ending
from virtbus.nodeagent.vm.operations import stop
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

A = uid(1)
STRATEGIES = ["Always", "RerunOnFailure", "Once", "Manual"]


class Stubborn(Domains):
    """A guest that takes its time to shut down."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def shutdown(self, of: str) -> bool:
        self.asked.set()
        return await super().shutdown(of)


class NoDestroy(Domains):
    """libvirt does not answer the first `fails` calls that end a guest, or blocks one."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def destroy(self, of: str, *, forced: bool = False) -> None:
        self.asked.set()
        if self.fails:
            self.fails -= 1
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")
        await self.go.wait()
        await super().destroy(of, forced=forced)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def told(node: Node, state: str, power_epoch: int) -> bool:
    found = await node.status(A)
    return found is not None and (str(found.state), found.power_epoch) == (state, power_epoch)


def vm(strategy: str = "Always", *, grace_s: int = 0, epoch: int = 0) -> VmRecord:
    """The VM, restarted under the power epoch `epoch`."""
    spec = {"run_strategy": strategy, "termination_grace_s": grace_s}
    return record(power_epoch=epoch, restart_epoch=epoch, spec=spec)


def starts(node: Node) -> int:
    return node.domains.done.count(("start", A))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_restart_ends_the_guest_and_starts_it_once(node: Node, strategy: str) -> None:
    await node.join()
    await node.put(vm(strategy))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(strategy, epoch=1))
        await eventually(lambda: told(node, "Running", 1))
        for _ in range(3):
            await node.put(vm(strategy, epoch=1))
        await node.start_another()
        assert starts(node) == 2
    async with node.agent():
        await node.start_another()
        assert starts(node) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_agent_after_a_crash_performs_an_unread_restart(
    node: Node, strategy: str
) -> None:
    await node.join()
    await node.put(vm(strategy))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
    await node.put(vm(strategy, epoch=1))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 1))
        assert starts(node) == 2


async def test_a_guest_that_boots_is_asked_to_shut_down_until_it_does(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not notice the first request. The next run is not asked."""
    monkeypatch.setattr(stop, "PRESS_S", 0.02)
    await node.join()
    await node.put(vm(grace_s=3600))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(grace_s=3600, epoch=1))
        while node.domains.done.count(("shutdown", A)) < 3:
            await asyncio.sleep(0.01)
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(lambda: told(node, "Running", 1))
        asked = node.domains.done.count(("shutdown", A))
        await asyncio.sleep(0.1)
        assert node.domains.done.count(("shutdown", A)) == asked
        assert starts(node) == 2


@pytest.mark.parametrize("epoch", [0, 3])
async def test_a_guest_of_an_older_agent_continues_until_a_restart_is_requested(
    node: Node, epoch: int
) -> None:
    started = record(power_epoch=epoch, spec={"termination_grace_s": 0})
    await node.join()
    await node.put(started)
    async with node.agent():
        await eventually(lambda: told(node, "Running", epoch))
    facts = node.domains.there[A]
    assert facts.metadata is not None
    older = replace(facts.metadata, power_epoch=-1, pause_epoch=0)
    node.domains.there[A] = replace(facts, metadata=older)
    async with node.agent():
        await node.start_another()
        assert ("destroy", A) not in node.domains.done
        assert starts(node) == 1
        again = {"power_epoch": epoch + 1, "restart_epoch": epoch + 1}
        await node.put(started.model_copy(update=again))
        await eventually(lambda: told(node, "Running", epoch + 1))
        assert starts(node) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_agent_after_a_crash_finishes_a_half_done_restart(
    node: Node, strategy: str
) -> None:
    node.domains = domains = Stubborn()
    await node.join()
    await node.put(vm(strategy, grace_s=3600))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(strategy, grace_s=3600, epoch=1))
        await domains.asked.wait()
        await eventually(lambda: told(node, "Stopping", 0))
    domains.set(A, DomainState.SHUT_OFF, Ending.SHUT_DOWN)
    async with node.agent():
        await eventually(lambda: told(node, "Running", 1))
        assert starts(node) == 2


async def test_the_guest_gets_its_grace_before_it_is_started_again(node: Node) -> None:
    node.domains = domains = Stubborn()
    await node.join()
    await node.put(vm(grace_s=3600))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(grace_s=3600, epoch=1))
        await domains.asked.wait()
        assert starts(node) == 1
        domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(lambda: told(node, "Running", 1))
        assert ("destroy", A) not in domains.done


async def test_a_late_stop_of_an_ended_guest_does_not_end_its_next_run(
    node: Node,
) -> None:
    node.domains = domains = NoDestroy(fails=2)
    await node.join()
    await node.put(vm())
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(epoch=1))
        await eventually(lambda: domains.fails == 0)  # the third attempt is a second away
        domains.go.set()
        domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(lambda: told(node, "Running", 1))
        await asyncio.sleep(1.2)
        assert await told(node, "Running", 1)
        assert ("destroy", A) not in domains.done
        assert starts(node) == 2


async def test_a_start_waits_for_a_call_that_ends_the_earlier_run(node: Node) -> None:
    node.domains = domains = NoDestroy(fails=0)
    await node.join()
    await node.put(vm())
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(epoch=1))
        await domains.asked.wait()
        domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(lambda: told(node, "Starting", 1))
        assert starts(node) == 1
        domains.go.set()
        await eventually(lambda: told(node, "Running", 1))
        assert ("destroy", A) not in domains.done
        assert starts(node) == 2


async def test_a_stop_during_a_restart_wins(node: Node) -> None:
    node.domains = domains = Stubborn()
    await node.join()
    await node.put(vm(grace_s=3600))
    async with node.agent():
        await eventually(lambda: told(node, "Running", 0))
        await node.put(vm(grace_s=3600, epoch=1))
        await domains.asked.wait()
        stop = vm(grace_s=3600, epoch=1).model_copy(update={"powered": False, "power_epoch": 2})
        await node.put(stop)
        await eventually(lambda: told(node, "Stopping", 2))
        domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(lambda: told(node, "Stopped", 2))
        await node.start_another()
        assert starts(node) == 1


async def test_a_restart_of_a_paused_guest_brings_one_that_runs(node: Node) -> None:
    await node.join()
    await node.put(record(paused=True, pause_epoch=1))
    async with node.agent():
        await eventually(lambda: told(node, "Paused", 0))
        await node.put(record(power_epoch=1, restart_epoch=1, pause_epoch=1))
        await eventually(lambda: told(node, "Running", 1))
        assert starts(node) == 2


async def test_a_restart_during_a_start_restarts_that_starts_guest(node: Node) -> None:
    await node.join()
    async with node.agent():
        await node.start_another()
        await node.put(vm())
        await node.put(vm(epoch=1))
        await eventually(lambda: told(node, "Running", 1))
        domain = node.domains.there[A]
        assert domain.metadata is not None
        assert domain.metadata.power_epoch == 1


async def test_a_held_vm_is_restarted_once_it_is_released(node: Node) -> None:
    await node.join()
    await node.put(vm())
    async with node.agent() as agent:
        await eventually(lambda: told(node, "Running", 0))
        guest = agent.vms.actors[A]
        fence = Fence(by="operator", why="powered off", time_ns=1)
        await node.bus.put(subjects.node_spec(NODE), encode(NodeSpec(node=NODE, fenced=fence)))
        await eventually(lambda: guest.vm.reasons.held)
        await node.put(vm(epoch=1))
        await eventually(lambda: guest.vm.record.restart_epoch == 1)
        node.domains.tell(DomainEvent(A, DomainChange.RESUMED))
        assert starts(node) == 1
        await node.bus.purge(subjects.node_spec(NODE))
        await eventually(lambda: told(node, "Running", 1))
        assert starts(node) == 2
