"""A guest's end and its number of reboots are reported, and survive the agent."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainState, Ending
from virtbus.nodeagent.vm.observation import Observed
from virtbus.schemas import subjects
from virtbus.schemas.envelope import Envelope
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import read

A = uid(1)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def status(node: Node) -> VmStatus:
    found = await node.status(A)
    assert found is not None
    return found


async def counted(node: Node, times: int) -> bool:
    return (await status(node)).reboots == times


async def reboot(node: Node, times: int) -> None:
    node.domains.tell(DomainEvent(A, DomainChange.REBOOTED))
    await eventually(lambda: counted(node, times))


@pytest.mark.parametrize(
    ("ending", "change", "how"),
    [
        (Ending.SHUT_DOWN, DomainChange.SHUT_DOWN, "shut down"),
        (Ending.ENDED, DomainChange.ENDED, "ended"),
        (Ending.CRASHED, DomainChange.CRASHED, "crashed"),
    ],
)
async def test_the_cause_of_a_guests_own_end_is_reported_with_its_time(
    node: Node, ending: Ending, change: DomainChange, how: str
) -> None:
    await node.join()
    await node.put(record(spec={"run_strategy": "Once"}))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        before = await status(node)
        assert before.last_exit is None
        node.domains.end(A, ending, change)
        await eventually(in_state(node, "Succeeded" if how == "shut down" else "Failed"))
        end = (await status(node)).last_exit
        assert end is not None
        assert (end.how, end.asked) == (how, False)
        assert before.started_ns is not None
        assert end.at_ns >= before.started_ns
    async with node.agent():
        await node.start_another()
        assert (await status(node)).last_exit == end


@pytest.mark.parametrize("strategy", ["Once", "Always", "RerunOnFailure", "Manual"])
@pytest.mark.parametrize(
    ("change", "how", "words"),
    [
        (DomainChange.PANICKED, "panicked", "the guest panicked"),
        (DomainChange.WATCHDOG_POWEROFF, "watchdog", "the guest was powered off by its watchdog"),
    ],
)
async def test_panics_and_watchdogs_are_crashes_with_their_own_names(
    node: Node, change: DomainChange, how: str, words: str, strategy: str
) -> None:
    await node.join()
    await node.put(record(spec={"run_strategy": strategy}))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.tell(DomainEvent(A, change))  # libvirt ends it, and reports that next
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        node.domains.tell(DomainEvent(A, DomainChange.CRASHED))  # reported twice, it counts once

        async def ended() -> bool:
            return (await status(node)).last_exit is not None

        await eventually(ended)
        found = await status(node)
        assert found.last_exit is not None
        assert (found.last_exit.how, found.last_exit.asked) == (how, False)
        again = strategy in {"Always", "RerunOnFailure"}
        if not again:
            assert found.state == "Failed"
            assert found.message.startswith(words)
            return
        await eventually(in_state(node, "Running"))
        assert (await status(node)).restarts == 1
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)  # of another cause

        async def twice() -> bool:
            end = (await status(node)).last_exit
            return end is not None and end.how == "crashed"

        await eventually(twice)


async def test_a_watchdog_that_resets_its_guest_is_a_fact_and_no_end(node: Node) -> None:
    await node.join()
    await node.put(record(spec={"run_strategy": "Once"}))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.tell(DomainEvent(A, DomainChange.WATCHDOG_RESET))
        await reboot(node, 1)
        facts = await node.bus.history(subjects.event(NODE, A, EventKind.GUEST_WATCHDOG))
        assert [read(Envelope, fact.body).data["reason"] for fact in facts] == ["reset"]
        assert (await status(node)).last_exit is None
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(in_state(node, "Failed"))
        end = (await status(node)).last_exit
        assert end is not None
        assert end.how == "crashed"


async def test_a_requested_end_is_marked_and_kept_in_the_next_run(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(record(powered=False, power_epoch=1))
        await eventually(in_state(node, "Stopped"))
        await node.put(record(power_epoch=2))
        await eventually(in_state(node, "Running"))
        end = (await status(node)).last_exit
        assert end is not None
        assert (end.how, end.asked) == ("ended", True)


async def test_a_stop_without_a_guest_is_no_end_of_one(node: Node) -> None:
    """The VM waits for its next start, so the crash before it stays the last end."""
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        error = VirtbusError(Code.INTERNAL, "qemu_failed", "QEMU does not start")
        node.domains.errors["start"] = error
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)

        async def failed() -> bool:
            return (await status(node)).reason == "qemu_failed"

        await eventually(failed)
        crash = (await status(node)).last_exit
        await node.put(record(powered=False, power_epoch=1))
        await eventually(in_state(node, "Stopped"))
        found = (await status(node)).last_exit
        assert found == crash
        assert found is not None
        assert (found.how, found.asked) == ("crashed", False)
        facts = await node.bus.history(subjects.event(NODE, A, EventKind.DOMAIN_STOPPED))
        assert len(facts) == 1


async def test_an_end_while_the_agent_was_down_is_found(node: Node) -> None:
    await node.join()
    await node.put(record(spec={"run_strategy": "Once"}))
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.set(A, DomainState.SHUT_OFF, Ending.SHUT_DOWN)
    async with node.agent():
        await eventually(in_state(node, "Succeeded"))
        end = (await status(node)).last_exit
        assert end is not None
        assert (end.how, end.asked) == ("shut down", False)


async def test_reboots_are_counted_for_each_run_and_outlive_the_agent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.nodeagent.vm.observation.ONE_REBOOT_S", 0)
    await node.join()
    await node.put(record())

    async with node.agent():
        await eventually(in_state(node, "Running"))
        await reboot(node, 1)
        await reboot(node, 2)
        assert (await status(node)).rebooted_ns is not None
    async with node.agent():
        await node.start_another()
        await reboot(node, 3)
        await node.put(record(power_epoch=1, restart_epoch=1))
        await eventually(lambda: counted(node, 0))
        assert (await status(node)).restarts == 0


async def test_a_firmware_that_resets_once_more_is_the_same_reboot(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent() as agent:
        await eventually(in_state(node, "Running"))
        seen: Observed = agent.vms.actors[A].vm.observed
        for _ in range(3):
            node.domains.tell(DomainEvent(A, DomainChange.REBOOTED))
        await eventually(lambda: seen.reboots == 1)
        await node.start_another()
        assert seen.reboots == 1


async def test_a_rebooting_guest_is_ready_once_it_answers_again(node: Node) -> None:
    await node.join()
    await node.put(record())

    async def ready() -> bool:
        return any(c.type == "Ready" and c.status for c in (await status(node)).conditions)

    async with node.agent() as agent:
        await eventually(in_state(node, "Running"))
        await eventually(ready)
        seen: Observed = agent.vms.actors[A].vm.observed
        first_ns = seen.ready_ns
        node.domains.tell(DomainEvent(A, DomainChange.REBOOTED))
        await eventually(lambda: seen.ready_ns > first_ns)
        await eventually(ready)
