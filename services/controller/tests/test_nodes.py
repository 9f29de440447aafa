"""A node's health: heard, silent, left; no node is Down because of a bus failure."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

import pytest
from services.controller.tests.fleets import node, status, uid
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World, settle

from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.nodes import (
    DOWN_AFTER_S,
    ROWS,
    SUSPECT_AFTER_S,
    TOGETHER_S,
    NodeSignals,
    brake,
    state_of,
)
from virtbus.schemas.api import BusStatus, NodePage
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.node import NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

S = NodeState


# --- table -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("signs", "state"),
    [
        (NodeSignals(S.READY, 0.0), S.READY),
        (NodeSignals(S.READY, SUSPECT_AFTER_S), S.READY),
        (NodeSignals(S.READY, SUSPECT_AFTER_S + 0.1), S.SUSPECT),
        (NodeSignals(S.READY, DOWN_AFTER_S), S.SUSPECT),
        (NodeSignals(S.READY, DOWN_AFTER_S + 0.1), S.DOWN),
        (NodeSignals(S.READY, 999.0, braked=True), S.SUSPECT),
        (NodeSignals(S.RECOVERING, 0.0), S.RECOVERING),
        (NodeSignals(S.RECOVERING, 0.0, draining=True), S.RECOVERING),
        (NodeSignals(S.RECOVERING, 999.0), S.DOWN),
        (NodeSignals(S.READY, 0.0, draining=True), S.DRAINING),
        (NodeSignals(S.DRAINING, 0.0), S.DRAINING),
        (NodeSignals(S.READY, 11.0, draining=True), S.SUSPECT),
        (NodeSignals(S.LEFT, 0.0), S.LEFT),
        (NodeSignals(S.LEFT, 999.0), S.LEFT),
    ],
    ids=str,
)
def test_a_row(signs: NodeSignals, state: NodeState) -> None:
    assert state_of(signs) is state


def test_every_row_is_reached_and_every_sign_has_a_state() -> None:
    yes_no = (False, True)
    signs = [
        NodeSignals(said, silence_s, draining, braked)
        for said in (S.READY, S.RECOVERING, S.LEFT)
        for silence_s, draining, braked in product((0.0, 11.0, 26.0), yes_no, yes_no)
    ]
    assert {state_of(one) for one in signs} == {state for state, _ in ROWS} == set(NodeState)


@pytest.mark.parametrize(
    ("since", "nodes", "braked"),
    [
        ([], 0, False),
        ([5.0], 1, False),
        ([5.0, 5.0], 2, True),
        ([5.0, 5.0 + TOGETHER_S], 3, True),
        ([5.0, 5.1 + TOGETHER_S], 3, False),
        ([5.0] * 3, 9, False),
        ([5.0] * 4, 9, True),
        ([0.0, 11.0, 22.0, 33.0], 4, False),
        ([40.0, 0.0, 41.0, 11.0], 4, True),
    ],
)
def test_many_nodes_silent_together_trigger_the_brake(
    since: list[float], nodes: int, braked: bool
) -> None:
    assert brake(since, nodes) is braked


# --- user-visible state ----------------------------------------------------------------------
@asynccontextmanager
async def beating(made: World, *names: str) -> AsyncIterator[None]:
    """These nodes send a heartbeat every 4 s."""

    async def beat() -> None:
        number = 0
        while True:
            for name in names:
                number += 1
                await made.hear(node(name, time_ns=number))
            await asyncio.sleep(4)

    async with background() as tasks:
        tasks.start(beat())
        await settle()
        yield


async def states(made: World) -> dict[str, str]:
    page = validate(NodePage, await made.ask("list", resource="node"))
    return {one.node: str(one.state) for one in page.items}


async def facts(made: World) -> list[tuple[str, str]]:
    stored = await made.client.history("virtbus.evt.*._.node.>")
    found = [open_envelope(message.body).data for message in stored]
    return [(one["node"], one["kind"]) for one in found]


@played(nodes=1)
async def test_a_silent_node_is_suspect_then_down_and_then_ready_again(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored))
    async with beating(made, "n1"):
        await asyncio.sleep(60)
        assert await states(made) == {"n1": "ready"}
    seen: list[tuple[VmState, str]] = []
    async with made.watch(uid=uid(1)) as replies:
        for _ in range(2):
            await anext(replies)
        for wait_s, state in ((12, "suspect"), (15, "down")):
            await asyncio.sleep(wait_s)
            assert await states(made) == {"n1": state}
        async with beating(made, "n1"):
            await asyncio.sleep(2)
            assert await states(made) == {"n1": "ready"}
        async with asyncio.timeout(10):
            while not seen or seen[-1][0] is not VmState.RUNNING:
                change = (await anext(replies)).get("change")
                if change:
                    shown = validate(VmView, change)
                    seen.append((shown.state, shown.reason))
    unknown = [(VmState.UNKNOWN, "node_suspect"), (VmState.UNKNOWN, "node_down")]
    assert seen == [*unknown, (VmState.RUNNING, "")]
    assert await facts(made) == [("n1", f"node.{kind}") for kind in ("suspect", "down", "ready")]


@played(nodes=3, controllers=3)
async def test_one_of_three_controllers_emits_each_event_once(made: World) -> None:
    async with beating(made, "n1", "n2", "n3"):
        await asyncio.sleep(30)
    async with beating(made, "n1", "n2"):
        await asyncio.sleep(40)
        assert await states(made) == {"n1": "ready", "n2": "ready", "n3": "down"}
        assert await facts(made) == [("n3", "node.suspect"), ("n3", "node.down")]


@played(nodes=6, controllers=2)
async def test_nothing_is_done_when_many_nodes_fall_silent_together(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    names = [f"n{number}" for number in range(1, 7)]
    async with beating(made, *names):
        await asyncio.sleep(30)
    async with beating(made, *names[:3]):
        await asyncio.sleep(60)
        shown = await states(made)
        assert [shown[name] for name in names] == ["ready"] * 3 + ["suspect"] * 3
        page = validate(NodePage, await made.ask("list", resource="node"))
        assert "silent together" in page.alarms[0]
        bus = await made.ask("status", resource="bus")
        assert bus["alarms"] == list(page.alarms)
    async with beating(made, *names):
        await asyncio.sleep(5)
        assert set((await states(made)).values()) == {"ready"}
        assert validate(NodePage, await made.ask("list", resource="node")).alarms == ()
    assert ("n4", "node.down") not in await facts(made)


@played(nodes=2)
async def test_an_outage_of_the_bus_makes_no_node_down(made: World) -> None:
    async with beating(made, "n1", "n2"):
        await asyncio.sleep(30)
    made.buses["c1"].disconnect()
    await asyncio.sleep(120)
    made.buses["c1"].reconnect()
    await settle()
    assert set((await states(made)).values()) == {"ready"}
    async with beating(made, "n1", "n2"):
        await asyncio.sleep(60)
        assert set((await states(made)).values()) == {"ready"}
    assert await facts(made) == []


@played(nodes=1)
async def test_a_bus_that_accepts_no_writes_makes_no_node_down(made: World) -> None:
    """The connection works, but JetStream has no leader: neither a node nor a lease is renewed."""
    async with beating(made, "n1"):
        await asyncio.sleep(30)
    lease = made.server.shelf("$KV.lease.fleet")
    lease.max_bytes = 1
    await asyncio.sleep(120)
    assert await states(made) == {"n1": "ready"}
    lease.max_bytes = 0
    async with beating(made, "n1"):
        await asyncio.sleep(30)
    assert await facts(made) == []


@played(nodes=2)
async def test_a_stopped_node_is_not_silent_and_ends_with_its_record(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    stored = await made.stored(uid(1))
    assert stored is not None
    left = stored.node
    async with beating(made, *({"n1", "n2"} - {left})):
        await made.hear(node(left, state=NodeState.LEFT))
        await asyncio.sleep(60)
        assert (await states(made))[left] == "left"
        shown = await made.vm("get", uid=uid(1))
        assert (shown.state, shown.reason) == (VmState.UNKNOWN, "node_left")
        await made.host.purge(f"$KV.node.{left}")
        await asyncio.sleep(2)
        assert (await states(made))[left] == "left", "it holds a VM"
        await made.host.purge(f"$KV.vm.{left}.{uid(1)}")
        await asyncio.sleep(3)
        await made.host.purge(f"$KV.node.{left}")
        await asyncio.sleep(2)
        assert left not in await states(made)
    assert await facts(made) == [(left, "node.left")]


@played(nodes=1, controllers=3)
async def test_an_unreadable_value_is_a_dead_letter_and_an_alarm(made: World) -> None:
    await made.host.put("$KV.node.n1", b"\xc1 no record")
    await settle()
    for bus in made.buses.values():
        bus.disconnect()
        bus.reconnect()
    await settle()
    (letter,) = await made.client.history("virtbus.dlq.>")
    data = open_envelope(letter.body).data
    assert (data["subject"], data["size_bytes"]) == ("$KV.node.n1", 11)
    told = validate(BusStatus, await made.ask("status", resource="bus"))
    assert told.dead_letters == 1
    assert "$KV.node.n1 cannot be read" in told.alarms[0]
    assert "could not be handled" in told.alarms[1]
