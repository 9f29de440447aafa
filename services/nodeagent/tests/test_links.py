"""Links of a guest's NICs: the record's state reaches the guest, over restarts of the agent."""

from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.guest_nics import at_start
from virtbus.nodeagent.core.metadata import domain_hash
from virtbus.schemas.vm import VmRecord

A = uid(1)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def linked(state: str, generation: int = 1, **more: Any) -> VmRecord:
    nics = [{"name": "net0"}, {"name": "net1", "state": state, **more}]
    spec = {
        "domain": {"devices": {"interfaces": nics}},
        "networks": [{"name": "net0"}, {"name": "net1"}],
    }
    return record(spec=spec, generation=generation)


def orders(node: Node) -> list[str]:
    return [what for what, of in node.domains.done if of == A and what.startswith("link")]


async def test_a_guest_starts_with_its_link_down_and_gets_each_change(node: Node) -> None:
    await node.join()
    await node.put(linked("down"))
    async with node.agent():
        await eventually(lambda: orders(node) == ["link vbnet1 down"])
        await eventually(in_state(node, "Running"))
        await node.put(linked("up", 2))
        await eventually(lambda: orders(node) == ["link vbnet1 down", "link vbnet1 up"])
        await node.put(linked("up", 3, limits={"inbound": {"bytes_per_s": 1000}}))
        await node.start_another()
        status = await node.status(A)
        assert status is not None
        assert "RestartRequired" not in [one.type for one in status.conditions]
        assert len(orders(node)) == 2


async def test_a_guest_with_links_up_is_left_alone(node: Node) -> None:
    await node.join()
    await node.put(linked("up"))
    for _agent in range(2):
        async with node.agent():
            await eventually(in_state(node, "Running"))
            await node.start_another()
    assert orders(node) == []


async def test_a_change_while_no_agent_runs_is_made_by_the_next_one(node: Node) -> None:
    await node.join()
    await node.put(linked("down"))
    async with node.agent():
        await eventually(lambda: orders(node) == ["link vbnet1 down"])
        await eventually(in_state(node, "Running"))
    await node.put(linked("up", 2))
    async with node.agent():
        await eventually(lambda: orders(node)[1:] == ["link vbnet0 up", "link vbnet1 up"])


async def test_a_link_that_qemu_refuses_is_tried_again_and_does_not_stop_the_guest(
    node: Node,
) -> None:
    await node.join()
    node.domains.links_fail = True
    await node.put(linked("down"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        node.domains.links_fail = False
        await eventually(lambda: orders(node) == ["link vbnet1 down"])


def test_only_changes_that_a_running_guest_cannot_get_need_a_restart() -> None:
    before = domain_hash(linked("up"))
    limits = {"outbound": {"bytes_per_s": "1MiB"}}
    assert domain_hash(linked("down", limits=limits)) == before
    nics = at_start(linked("up"))
    assert at_start(linked("down", limits=limits)) == nics
    changes: tuple[dict[str, Any], ...]
    changes = ({"mtu": 1400}, {"queues": 2}, {"model": "e1000"}, {"boot_order": 1})
    for more in changes:
        assert at_start(linked("up", 1, **more))["net1"] != nics["net1"]
