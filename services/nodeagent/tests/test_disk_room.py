"""A guest whose disk has no room waits, says why, and goes on by itself (F30)."""

from pathlib import Path

from services.nodeagent.tests.pretended_node import Node, eventually, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainFacts, DomainState

A = uid(1)


async def test_a_guest_that_waits_for_room_is_told_and_tried_again(tmp_path: Path) -> None:
    node = Node(tmp_path, compare_s=0.1)
    async with node.agent():
        await node.put(record())

        async def running() -> bool:
            return await node.state(A) == "Running"

        await eventually(running)
        node.domains.there[A] = DomainFacts(A, DomainState.PAUSED, waits_for_disk=True)
        node.domains.tell(DomainEvent(A, DomainChange.PAUSED))

        async def told() -> bool:
            status = await node.status(A)
            return status is not None and "no room" in status.message

        await eventually(told)
        await eventually(running)
        assert ("resume", A) in node.domains.done

        async def well() -> bool:
            status = await node.status(A)
            return status is not None and not status.message

        await eventually(well)


async def test_a_guest_that_somebody_paused_stays_paused(tmp_path: Path) -> None:
    node = Node(tmp_path, compare_s=0.05)
    async with node.agent():
        await node.put(record())

        async def in_state_running() -> bool:
            return await node.state(A) == "Running"

        await eventually(in_state_running)
        node.domains.set(A, DomainState.PAUSED)

        async def paused() -> bool:
            return await node.state(A) == "Paused"

        await eventually(paused)
    assert ("resume", A) not in node.domains.done
