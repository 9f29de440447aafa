"""A node that cannot take a VM declines before any work, and releases others' preparations."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.nodeagent.core.capacity_check import no_room, promised_bytes
from virtbus.nodeagent.core.ports import HostFacts
from virtbus.schemas import subjects
from virtbus.schemas.node import Drain, NodeSpec
from virtbus.schemas.vm import Cpu, Memory, VmRecord
from virtbus.schemas.wire import encode

GIB = 1024**3
HOST = HostFacts("h", 4, 8 * GIB, 0, 0, 16, ("tcg",), {})


def sized(
    number: int, *, memory_bytes: int = GIB, cores: int = 1, powered: bool = True
) -> VmRecord:
    one = record(number, powered=powered)
    domain = one.spec.domain.model_copy(
        update={"memory": Memory(guest=memory_bytes), "cpu": Cpu(cores=cores)}
    )
    return one.model_copy(update={"spec": one.spec.model_copy(update={"domain": domain})})


def test_memory_is_refused_only_where_the_host_has_none_left() -> None:
    held = (sized(1, memory_bytes=5 * GIB), sized(2, memory_bytes=4 * GIB, powered=False))
    held_bytes = sum(map(promised_bytes, held))
    assert no_room(sized(3, memory_bytes=3 * GIB), held_bytes, HOST) == ""
    assert "has 3GiB of memory left" in no_room(sized(3, memory_bytes=4 * GIB), held_bytes, HOST)
    assert no_room(sized(3, memory_bytes=4 * GIB, powered=False), held_bytes, HOST) == ""


def test_more_vcpus_than_a_guest_can_have_are_refused() -> None:
    assert no_room(sized(1, cores=16), 0, HOST) == ""
    assert "at most 16 vCPUs" in no_room(sized(1, cores=17), 0, HOST)


def refused(node: Node) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        status = await node.status(uid(1))
        return status is not None and status.refused and status.released

    return check


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, resync_s=0.05, orphan_grace_s=600)


async def test_a_drained_node_releases_late_vms_and_forgets_them_once_moved(
    node: Node,
) -> None:
    await node.join()
    node_spec = NodeSpec(node=NODE, cordoned=True, draining=Drain(since_ns=1))
    await node.bus.put(subjects.node_spec(NODE), encode(node_spec))
    async with node.agent():
        await node.put(record())
        await eventually(refused(node))
        status = await node.status(uid(1))
        assert status is not None
        assert status.message == f"{NODE} is being drained"
        assert node.domains.there == {}
        await node.bus.purge(subjects.vm_record(NODE, uid(1)))

        async def forgotten() -> bool:
            return await node.status(uid(1)) is None

        await eventually(forgotten)


async def test_a_cordoned_node_takes_the_vms_of_its_pods(node: Node) -> None:
    await node.join()
    node_spec = NodeSpec(node=NODE, cordoned=True, draining=Drain(since_ns=1))
    await node.bus.put(subjects.node_spec(NODE), encode(node_spec))
    async with node.agent():
        await node.put(record(owner=f"cri-{NODE}"))
        await eventually(lambda: ("start", uid(1)) in node.domains.done)


async def test_a_refused_vm_is_refused_by_the_next_agent_and_accepted_under_a_higher_epoch(
    node: Node,
) -> None:
    """A controller may be moving it by the first refusal: two nodes would run it (I1)."""
    await node.join()
    await node.bus.put(subjects.node_spec(NODE), encode(NodeSpec(node=NODE, cordoned=True)))
    await node.put(record())
    async with node.agent():
        await eventually(refused(node))
    await node.bus.purge(subjects.node_spec(NODE))
    await node.bus.purge(subjects.vm_status(NODE, uid(1)))
    async with node.agent():
        await eventually(refused(node))
        assert node.domains.done == []
        assert node.files.removed() == {}
        await node.put(record(epoch=2))
        await eventually(lambda: ("start", uid(1)) in node.domains.done)


async def test_running_vms_continue_when_their_node_is_cordoned(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():

        async def running() -> bool:
            return await node.state(uid(1)) == "Running"

        await eventually(running)
        node_spec = NodeSpec(node=NODE, cordoned=True)
        await node.bus.put(subjects.node_spec(NODE), encode(node_spec))
    async with node.agent():
        await eventually(running)
        status = await node.status(uid(1))
        assert status is not None
        assert not status.refused
