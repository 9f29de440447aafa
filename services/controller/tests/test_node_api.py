"""What is wanted of a node, as a client of the API sees it."""

import asyncio
from typing import Any

from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.ports import Entry, EntryKind, WatchMark
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeDetail
from virtbus.schemas.states import VmState
from virtbus.schemas.wire import validate


async def detail(made: World, verb: str, name: str = "n1", **data: object) -> NodeDetail:
    answer = await made.ask(verb, resource="node", node=name, **data)
    await settle()
    return validate(NodeDetail, answer)


@played(nodes=2, controllers=2)
async def test_a_cordoned_node_takes_no_vm_from_any_controller(made: World) -> None:
    shown = await detail(made, "cordon")
    assert shown.node.wish is not None
    assert shown.node.wish.cordoned
    placed = [(await made.vm("create", name=f"v{n}", image="tiny")).node for n in range(8)]
    assert set(placed) == {"n2"}


@played()
async def test_a_create_that_only_a_cordoned_node_could_take_says_so(made: World) -> None:
    await detail(made, "cordon")
    waits = await made.vm("create", name="web", image="tiny")
    assert (waits.state, waits.message) == (
        VmState.PENDING,
        "no node can take it now: n1 is cordoned",
    )


@played()
async def test_cordon_keeps_the_vms_there_and_uncordon_leaves_no_trace(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    shown = await detail(made, "cordon")
    assert [vm.name for vm in shown.vms] == ["web"]
    again = await detail(made, "cordon")
    assert again.node.wish == shown.node.wish
    await detail(made, "uncordon")
    entry = await made.host.get(subjects.node_wish("n1"))
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
    assert (await made.vm("create", name="more", image="tiny")).node == "n1"
    assert (await detail(made, "cordon")).node.wish is not None


@played()
async def test_a_wish_outlives_its_controller_and_a_new_list(made: World) -> None:
    await detail(made, "cordon")
    made.buses["c1"].disconnect()
    await settle()
    made.buses["c1"].reconnect()
    await settle()
    assert (await detail(made, "get")).node.wish is not None
    assert (await made.vm("create", name="web", image="tiny")).node == "_"


@played()
async def test_an_uncordon_that_a_controller_missed_is_learnt_from_its_next_list(
    made: World,
) -> None:
    await detail(made, "cordon")
    made.buses["c1"].disconnect()
    await settle()
    await made.host.purge(subjects.node_wish("n1"))
    made.buses["c1"].reconnect()
    await settle()
    assert (await made.vm("create", name="web", image="tiny")).node == "n1"


@played(nodes=2, controllers=2)
async def test_a_node_that_is_gone_for_good_is_forgotten_by_every_controller(made: World) -> None:
    await made.host.put(subjects.join_nonce("n2"), b"x")
    await detail(made, "cordon", "n1")
    web = await made.vm("create", name="web", image="tiny", uid=uid(1))
    assert web.node == "n2"
    await made.say(status(record(1, node="n2")))
    await made.say(status(record(9, node="n2")))
    assert (await refused(forget(made))).reason == "node_answers"
    await detail(made, "cordon", "n2")
    await asyncio.sleep(30)
    error = await refused(forget(made))
    assert error.reason == "node_has_vms"
    assert "virtbus node fence n2" in str(error)
    await made.vm("delete", uid=uid(1))
    await made.say(status(record(1, node="n2"), released=True))
    await settle()
    assert (await forget(made))["statuses"] == 2
    await settle()
    for key in ("$KV.vm.n2.>", "$KV.st.n2.>"):
        async with made.host.watch(key) as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    break
                assert not isinstance(item, Entry) or item.kind is EntryKind.PURGE
    for controller in made.controllers.values():
        assert set(controller._fleet.nodes) == {"n1"}
    assert (await refused(forget(made))).code == 404
    await made.hear(node("n2"))
    await settle()
    assert (await detail(made, "get", "n2")).node.node == "n2"


async def forget(made: World) -> Any:
    return await made.ask("forget", resource="node", node="n2")


@played()
async def test_an_unknown_node_is_404_and_a_joined_one_is_shown(made: World) -> None:
    for verb in ("get", "cordon", "uncordon"):
        error = await refused(made.ask(verb, resource="node", node="n9"))
        assert (error.code, error.reason) == (404, "node_not_found")
    await made.hear(node("n9"))
    await settle()
    assert (await detail(made, "get", "n9")).node.node == "n9"
