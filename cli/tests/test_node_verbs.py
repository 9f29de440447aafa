"""Drain, fence and move as a person types them, against scripted services."""

from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import NodeDetail, NodeForgotten, NodeVm, WatchReply
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import Drain, Fence, NodeSpec, NodeState, NodeView
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import Condition

pytestmark = pytest.mark.integration


def detail(*vms: NodeVm, **node_spec: Any) -> NodeDetail:
    node = NodeView(
        node="n1",
        hostname="n1",
        instance="i",
        state=NodeState.READY,
        cpus=4,
        memory_bytes=8 << 30,
        node_spec=NodeSpec(node="n1", cordoned=True, **node_spec),
    )
    return NodeDetail(node=node, vms=vms)


def vm(**more: Any) -> NodeVm:
    return NodeVm(uid=UID, namespace="default", name="web", state=VmState.RUNNING, **more)


async def test_drain_lists_leaving_vms_and_their_targets(script: Script, cli: Cli) -> None:
    looks = [detail(vm(evacuating=True)), detail()]

    async def get(_: Request) -> NodeDetail:
        return looks.pop(0)

    script.answer("node", "drain", detail(vm(), draining=Drain(since_ns=1)))
    script.handlers["node", "get"] = get
    script.answer("vm", "get", vm_view(node="n2"))
    ended = await cli("node", "drain", "n1", "--discard-local-disks")
    assert ended.code == 0, ended.err
    assert "leaves              default/web" in ended.err
    assert "default/web is on n2" in ended.err
    assert script.data("node.drain") == [{"node": "n1", "discard_local_disks": True}]


async def test_drain_lists_remaining_vms_and_exits_1(script: Script, cli: Cli) -> None:
    stuck = detail(
        vm(eviction_blocked_reason="its disks are on this node (root)"), draining=Drain(since_ns=1)
    )
    script.answer("node", "drain", stuck)
    script.answer("node", "get", stuck)
    ended = await cli("node", "drain", "n1")
    assert ended.code == 1
    assert "default/web: its disks are on this node (root)" in ended.err
    assert "virtbus node uncordon n1" in ended.err
    quick = await cli("node", "drain", "n1", "--no-wait", "-o", "json")
    assert quick.code == 0
    assert quick.json["vms"][0]["eviction_blocked_reason"] == "its disks are on this node (root)"


async def test_a_drain_that_takes_too_long_is_unknown_and_continues(
    script: Script, cli: Cli
) -> None:
    going = detail(vm(evacuating=True), draining=Drain(since_ns=1))
    script.answer("node", "drain", going)
    script.answer("node", "get", going)
    ended = await cli("node", "drain", "n1", "--timeout", "0.1")
    assert ended.code == 4
    assert "it continues by itself" in ended.err


async def test_fence_needs_a_confirmation_and_shows_waiting_vms(script: Script, cli: Cli) -> None:
    proof = Fence(by="operator", why="powered off", time_ns=1)
    script.answer(
        "node",
        "fence",
        detail(vm(eviction_blocked_reason="its disks are on this node"), fenced=proof),
    )
    assert (await cli("node", "fence", "n1")).code == 2
    ended = await cli("node", "fence", "n1", "--confirm", "powered off")
    assert ended.code == 0, ended.err
    assert "ready,fenced,cordoned" in ended.out
    assert "its disks are on this node" in ended.out
    script.answer("node", "unfence", VirtbusError(Code.CONFLICT, "node_silent", "no answer"))
    assert (await cli("node", "unfence", "n1")).code == 1


async def test_forget_names_the_next_step(script: Script, cli: Cli) -> None:
    script.answer("node", "forget", NodeForgotten(node="n1"))
    ended = await cli("node", "forget", "n1")
    assert ended.code == 0, ended.err
    assert "virtbus bus remove-node n1" in ended.out


async def test_move_waits_until_the_vm_runs_there(script: Script, cli: Cli) -> None:
    moving = Condition(type="Evacuating", status=True)
    script.answer("vm", "move", vm_view(conditions=(moving,)))
    there = vm_view(node="n2", epoch=2)
    await script.see(WatchReply(items=(there,)), WatchReply(synced=True))
    ended = await cli("vm", "move", "web", "--to", "n2")
    assert ended.code == 0, ended.err
    assert " n2 " in ended.out
    assert script.data("vm.move")[0]["to"] == "n2"
