"""VMs that leave a node, come back to it, or were moved while it was down (F21, F25)."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import ConflictError, OutcomeUnknownError
from virtbus.nodeagent.core.ports import DomainState
from virtbus.nodeagent.vm import status as statuses
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.node_rpc import Release, ReleaseReply
from virtbus.schemas.wire import encode
from virtbus.simulator.services import SimulatedNode

A = uid(1)
KEY = subjects.vm_record(NODE, A)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, resync_s=0.05, orphan_grace_s=600)


def released(node: Node, epoch: int = 1) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        status = await node.status(A)
        return status is not None and status.released and status.epoch == epoch

    return check


def held(node: Node) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        status = await node.status(A)
        return status is not None and "node unfence n1" in status.message

    return check


def gone(node: Node) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return await node.status(A) is None

    return check


async def fence(node: Node) -> None:
    proof = Fence(by="operator", why="powered off", time_ns=1)
    node_spec = NodeSpec(node=NODE, fenced=proof)
    await node.bus.put(subjects.node_spec(NODE), encode(node_spec))


async def unfence(node: Node) -> None:
    await node.bus.purge(subjects.node_spec(NODE))


async def run_once(node: Node, **more: Any) -> None:
    """One VM, started by an agent that has ended since."""
    await node.join()
    await node.put(record(**more))
    async with node.agent():
        await eventually(in_state(node, "Running"))
    node.domains.done.clear()


async def power_off(node: Node) -> None:
    """The host powers off: its guests end, its disk stays."""
    for of in list(node.domains.there):
        node.domains.set(of, DomainState.SHUT_OFF)


async def test_a_leaving_vm_is_ended_released_and_forgotten_once_moved(node: Node) -> None:
    await run_once(node)
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(record(evacuating=True))
        await eventually(released(node))
        assert node.domains.done == [("destroy", A)]
        assert node.domains.there == {}
        assert await node.files.list() == {}
        await node.bus.purge(KEY)
        await eventually(gone(node))


async def test_an_agent_that_restarts_while_a_vm_leaves_reports_the_release_again(
    node: Node,
) -> None:
    await run_once(node)
    await node.put(record(evacuating=True))
    async with node.agent():
        await eventually(released(node))
    await node.bus.purge(subjects.vm_status(NODE, A))
    async with node.agent():
        await eventually(released(node))
    assert ("start", A) not in node.domains.done


async def test_a_vm_that_left_and_comes_back_starts_as_new(node: Node) -> None:
    await run_once(node)
    async with node.agent():
        await node.put(record(evacuating=True))
        await eventually(released(node))
        await node.put(record(epoch=2))  # the marker of the move is never seen
        await eventually(in_state(node, "Running"))
        found = await node.status(A)
    assert found is not None
    assert (found.epoch, node.domains.done[-1]) == (2, ("start", A))


async def test_a_release_does_not_wait_for_parts_of_the_next_assignment(node: Node) -> None:
    await run_once(node)
    await node.put(record(evacuating=True))
    async with node.agent():  # reports the release; the next agent was killed before that
        await eventually(released(node))
    await node.bus.purge(subjects.vm_status(NODE, A))

    def taken_back(_self: SimulatedNode, _want: Release) -> ReleaseReply:
        raise VirtbusError(Code.CONFLICT, "stale_epoch", "it is held for epoch 2")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNode, "release", taken_back)
        async with node.agent():
            await eventually(released(node))
            await node.put(record(epoch=2))
            await eventually(in_state(node, "Running"))


async def test_a_lower_epoch_never_starts(node: Node) -> None:
    await run_once(node, epoch=3)
    async with node.agent():
        await node.put(record(epoch=3, evacuating=True))
        await eventually(released(node, 3))
        await node.bus.purge(KEY)
        await eventually(gone(node))
        await node.put(record(epoch=2))
        await node.start_another()
    assert ("start", A) not in node.domains.done


async def test_a_guest_whose_record_was_moved_away_is_ended_at_once(node: Node) -> None:
    """A false fence: the other copy may run, so there is no grace here."""
    spec = {"termination_grace_s": 3600}
    await run_once(node, spec=spec)
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.bus.purge(KEY)
        await eventually(gone(node))
    assert node.domains.done == [("destroy", A)]
    assert await node.files.list() == {}


async def test_a_returned_node_never_starts_moved_vms_and_cleans_them_up(
    node: Node,
) -> None:
    await run_once(node)
    await power_off(node)
    await fence(node)
    await node.bus.purge(KEY)
    async with node.agent():
        await eventually(gone(node))
        assert await node.files.list() == {}
    assert node.domains.there == {}
    assert node.domains.done == []


async def test_a_node_that_was_cut_off_ends_moved_guests_when_it_is_back(node: Node) -> None:
    await run_once(node)
    await node.bus.purge(KEY)  # while only the agent is down
    async with node.agent():
        await eventually(gone(node))
    assert node.domains.done == [("destroy", A)]


async def test_a_fenced_node_starts_nothing_until_it_is_unfenced(node: Node) -> None:
    await run_once(node)
    await power_off(node)
    await fence(node)
    async with node.agent():
        await eventually(held(node))
        assert node.domains.done == []
        await unfence(node)
        await eventually(in_state(node, "Running"))


async def test_a_guest_that_ended_with_its_host_is_never_shown_as_running(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is held: the status of an earlier agent is overwritten at once."""
    monkeypatch.setattr(statuses, "PASSING_S", 60.0)
    await run_once(node)
    await power_off(node)
    await fence(node)
    async with node.agent():
        await eventually(in_state(node, "Scheduled"))
        await eventually(held(node))
        assert node.domains.done == []


async def test_a_vm_moved_off_a_fenced_node_that_is_back_was_not_started_there(
    node: Node,
) -> None:
    """The record is still here when the agent lists, and is moved a moment later."""
    await run_once(node)
    await power_off(node)
    await fence(node)
    async with node.agent():
        await eventually(held(node))
        await node.bus.purge(KEY)
        await eventually(gone(node))
        await unfence(node)
        await node.start_another()
    assert ("start", A) not in node.domains.done


async def test_a_deleted_vm_of_a_fenced_node_is_released_as_usual(node: Node) -> None:
    await run_once(node)
    await fence(node)
    await node.put(record(deleting=True))
    async with node.agent():
        await eventually(released(node))


async def test_a_fence_that_was_lifted_while_the_agent_was_cut_off_is_lifted(node: Node) -> None:
    await run_once(node)
    await power_off(node)
    await fence(node)
    async with node.agent():
        await eventually(held(node))
        shelf = node.server.shelf(KEY)
        del shelf.entries[subjects.node_spec(NODE)]  # the marker expired before it was seen
        await eventually(in_state(node, "Running"))


class SlowStatuses(MemoryBus):
    """Puts of statuses are stored once `go_on` is set, though nobody may wait for them any more."""

    def __init__(self, server: MemoryServer, group: asyncio.TaskGroup) -> None:
        super().__init__(server, "agent")
        self._group = group
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.asked = 0

    async def put(self, key: str, value: bytes, **more: Any) -> int:
        if not key.startswith("$KV.st.") or self.go_on.is_set():
            return await super().put(key, value, **more)
        self.asked += 1
        return await asyncio.shield(self._group.create_task(self._late(key, value, **more)))

    async def _late(self, key: str, value: bytes, **more: Any) -> int:
        await self.go_on.wait()
        return await super().put(key, value, **more)


async def test_a_status_that_is_still_under_way_is_not_stored_behind_its_purge(node: Node) -> None:
    await run_once(node)
    async with (
        asyncio.TaskGroup() as group,
        node.agent(bus := SlowStatuses(node.server, group)),
    ):
        await eventually(in_state(node, "Running"))
        bus.go_on.clear()
        await node.bus.purge(KEY)
        await eventually(lambda: bus.asked and ("destroy", A) in node.domains.done)
        await asyncio.sleep(0.3)  # enough for a purge, and for checking whether a status is left
        bus.go_on.set()
        await eventually(gone(node))
        await node.start_another()
        assert await node.status(A) is None


class LostPuts(MemoryBus):
    """Puts of statuses hang in a broken connection: they may be stored whenever it heals."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server, "agent")
        self.broken = False
        self.hanging: list[tuple[str, bytes, dict[str, Any]]] = []

    async def put(self, key: str, value: bytes, **more: Any) -> int:
        if not key.startswith("$KV.st.") or not self.broken:
            return await super().put(key, value, **more)
        self.hanging.append((key, value, more))
        msg = "no answer in time"
        raise OutcomeUnknownError(msg)

    async def heal(self) -> None:
        self.broken = False
        for key, value, more in self.hanging:
            with suppress(ConflictError):
                await super().put(key, value, **more)


async def test_a_status_that_hung_in_a_broken_connection_is_not_stored_behind_its_purge(
    node: Node,
) -> None:
    await run_once(node)
    async with node.agent(bus := LostPuts(node.server)):
        await eventually(in_state(node, "Running"))
        bus.broken = True
        await node.put(record(powered=False, power_epoch=2))
        await eventually(lambda: bus.hanging)
        await node.bus.purge(KEY)
        await eventually(gone(node))
        await bus.heal()
        assert await node.status(A) is None
