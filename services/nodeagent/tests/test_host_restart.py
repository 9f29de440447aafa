"""libvirt or the host restarted: no domain knows how its guest ended (F6, F23)."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry
from virtbus.bus.errors import UnavailableError
from virtbus.nodeagent.core.ports import DomainChange, DomainState, Ending
from virtbus.nodeagent.vm import actions
from virtbus.nodeagent.vm import status as nodestatus
from virtbus.schemas import subjects
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.wire import encode

A = uid(1)
STRATEGIES = ("Always", "RerunOnFailure", "Once", "Manual", "Halted")


async def started(node: Node, strategy: str) -> None:
    await node.join()
    await node.put(record(1, spec={"run_strategy": strategy}))


async def crashed(node: Node, strategy: str) -> None:
    """A permanently crashed guest, and a host that has been off since."""
    await started(node, strategy)
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(in_state(node, "Failed"))
    node.domains.done.clear()
    node.domains.set(A, DomainState.SHUT_OFF)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_after_a_reboot_a_guest_that_ran_is_started_by_its_run_strategy(
    tmp_path: Path, strategy: str
) -> None:
    node = Node(tmp_path)
    await started(node, strategy)
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.done.clear()
    node.domains.set(A, DomainState.SHUT_OFF)
    again = strategy in {"Always", "RerunOnFailure"}
    async with node.agent():
        if again:
            await eventually(lambda: node.domains.done == [("start", A)])
        await eventually(in_state(node, "Running" if again else "Failed"))
    assert node.domains.done == ([("start", A)] if again else [])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
async def test_a_guest_that_had_powered_itself_off_stays_off(tmp_path: Path, strategy: str) -> None:
    node = Node(tmp_path)
    await started(node, strategy)
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        await eventually(in_state(node, "Succeeded"))
    node.domains.done.clear()
    node.domains.set(A, DomainState.SHUT_OFF)
    async with node.agent() as agent:
        await eventually(
            lambda: A in agent.vms.actors and agent.vms.actors[A].vm.phase == "succeeded"
        )
        assert await node.state(A) == "Succeeded"
        await node.put(record(1, spec={"run_strategy": strategy}, power_epoch=1))
        await eventually(lambda: node.domains.done == [("start", A)])


async def test_a_start_requested_while_the_host_was_off_is_executed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await crashed(node, "Once")
    await node.put(record(1, spec={"run_strategy": "Once"}, power_epoch=1))
    async with node.agent():
        await eventually(lambda: node.domains.done == [("start", A)])


async def test_a_blocked_start_is_not_reported_as_an_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await started(node, "Once")
    async with node.agent() as agent:
        await eventually(in_state(node, "Running"))
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(in_state(node, "Failed"))
        fence = Fence(by="operator", why="powered off", time_ns=1)
        await node.bus.put(subjects.node_spec(NODE), encode(NodeSpec(node=NODE, fenced=fence)))
        await eventually(lambda: agent.vms.actors[A].vm.reasons.held)
        await node.put(record(1, spec={"run_strategy": "Once"}, power_epoch=1))
        await eventually(lambda: agent.vms.actors[A].vm.record.power_epoch == 1)
        assert agent.vms.actors[A].status().power_epoch == 0
    node.domains.done.clear()
    node.domains.set(A, DomainState.SHUT_OFF)
    await node.bus.purge(subjects.node_spec(NODE))
    async with node.agent():
        await eventually(lambda: node.domains.done == [("start", A)])


async def test_a_guest_that_crashes_at_each_start_is_tried_ever_more_slowly_until_it_is_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "backoff_s", lambda attempt: 0.01 * attempt)
    monkeypatch.setattr(actions, "STABLE_S", 0.3)
    node = Node(tmp_path)
    await started(node, "Always")
    async with node.agent() as agent:
        for crashes in (1, 2, 3):
            await eventually(in_state(node, "Running"))
            node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
            await eventually(lambda: agent.vms.actors[A].vm.observed.attempt == crashes)  # noqa: B023
            await eventually(lambda: len(node.domains.done) == 1 + crashes)  # noqa: B023
        await eventually(lambda: agent.vms.actors[A].vm.observed.attempt == 0)
        assert await node.state(A) == "Running"


@pytest.mark.parametrize("strategy", STRATEGIES[2:])
async def test_a_permanently_crashed_guest_stays_off(tmp_path: Path, strategy: str) -> None:
    node = Node(tmp_path)
    await crashed(node, strategy)
    async with node.agent() as agent:
        await eventually(lambda: A in agent.vms.actors and agent.vms.actors[A].vm.phase == "failed")
    assert node.domains.done == []


class Blind(MemoryBus):
    """A bus whose statuses cannot be read for the first `times` attempts."""

    def __init__(self, server: MemoryServer, times: int) -> None:
        super().__init__(server, "blind")
        self.tries, self.times = 0, times

    async def get(self, key: str) -> Entry | None:
        if key.startswith("$KV.st."):
            self.tries += 1
            if self.tries <= self.times:
                msg = "no leader"
                raise UnavailableError(msg)
        return await super().get(key)


@pytest.mark.parametrize("strategy", STRATEGIES[2:])
async def test_the_agent_waits_for_a_temporarily_unreadable_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(nodestatus, "RETRY_S", (0.01, 0.02))
    node = Node(tmp_path)
    await crashed(node, strategy)
    bus = Blind(node.server, 20)
    async with node.agent(bus) as agent:
        await eventually(lambda: bus.tries > 10)
        assert node.domains.done == []
        assert await node.state(A) == "Failed", "what was told before is not written over"
        await eventually(lambda: A in agent.vms.actors and agent.vms.actors[A].vm.phase == "failed")
    assert node.domains.done == []


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_once_vm_with_an_unreadable_status_is_not_started(
    tmp_path: Path, strategy: str
) -> None:
    node = Node(tmp_path)
    await started(node, strategy)
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.done.clear()
    node.domains.set(A, DomainState.SHUT_OFF)
    await node.bus.put(subjects.vm_status(NODE, A), b"\xc1")
    again = strategy in {"Always", "RerunOnFailure"}
    async with node.agent() as agent:
        wanted = "running" if again else "failed"
        await eventually(lambda: A in agent.vms.actors and agent.vms.actors[A].vm.phase == wanted)
    assert node.domains.done == ([("start", A)] if again else [])
