"""A node's desired state, as a client of the API sees it."""

import asyncio
import time
from typing import Any

from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world_on

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeDetail, NodePage
from virtbus.schemas.node import NodeSpec, NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode, read, validate


async def detail(made: World, verb: str, name: str = "n1", **data: object) -> NodeDetail:
    answer = await made.ask(verb, resource="node", node=name, **data)
    await settle()
    return validate(NodeDetail, answer)


@played(nodes=2, controllers=2)
async def test_a_cordoned_node_takes_no_vm_from_any_controller(made: World) -> None:
    shown = await detail(made, "cordon")
    assert shown.node.node_spec is not None
    assert shown.node.node_spec.cordoned
    placed = [(await made.vm("create", name=f"v{n}", image="tiny")).node for n in range(8)]
    assert set(placed) == {"n2"}


@played()
async def test_a_create_that_only_a_cordoned_node_could_take_names_the_reason(made: World) -> None:
    await detail(made, "cordon")
    waits = await made.vm("create", name="web", image="tiny")
    assert (waits.state, waits.message) == (
        VmState.PENDING,
        "no node can take it now: n1 is cordoned",
    )


@played()
async def test_cordon_keeps_the_vms_and_uncordon_clears_the_node_spec(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    shown = await detail(made, "cordon")
    assert [vm.name for vm in shown.vms] == ["web"]
    again = await detail(made, "cordon")
    assert again.node.node_spec is not None
    assert again.node.node_spec.cordoned
    await detail(made, "uncordon")
    node_spec = await wanted(made)
    assert node_spec == NodeSpec(node="n1", requests=node_spec.requests)
    assert len(node_spec.requests) == 3
    assert (await made.vm("create", name="more", image="tiny")).node == "n1"
    assert (await detail(made, "cordon")).node.node_spec is not None


async def wanted(made: World, name: str = "n1") -> NodeSpec:
    """Return a node's desired state on the bus."""
    entry = await made.host.get(subjects.node_spec(name))
    assert entry is not None
    return read(NodeSpec, entry.value)


def test_ids_in_an_empty_node_spec_expire_and_a_node_spec_does_not() -> None:
    days = 0

    def later_ns() -> int:
        return time.time_ns() + days * 86_400_000_000_000

    async def body() -> None:
        nonlocal days
        server = MemoryServer(clock_ns=later_ns)
        async with world_on(server, controllers=1, nodes=1) as made:
            await detail(made, "cordon")
            days = 2
            server.expire()
            assert (await wanted(made)).cordoned
            await detail(made, "uncordon")
            assert (await wanted(made)).idle
            days = 4
            server.expire()
            assert await made.host.get(subjects.node_spec("n1")) is None
            await made.hear(node("n1"))
            assert (await detail(made, "cordon")).node.node_spec is not None

    run(body)


async def again(made: World, verb: str, request_id: str, **data: object) -> Any:
    """Send a request about n1 under an id: the same id again is a repeat."""
    subject = subjects.api("node", verb)
    answer = await made.client.request(
        subject, {"node": "n1", **data}, timeout_s=10, request_id=request_id
    )
    await settle()
    return answer


@played(controllers=2)
async def test_a_late_request_does_not_undo_its_reversal(made: World) -> None:
    for verb in ("cordon", "drain"):
        await again(made, verb, f"{verb} 1")
        await again(made, "uncordon", f"{verb} 2")
        shown = validate(NodeDetail, await again(made, verb, f"{verb} 1"))
        assert shown.node.node_spec is not None
        assert shown.node.node_spec.idle
        assert (await wanted(made)).idle
        await again(made, verb, f"{verb} 3")
        await again(made, "uncordon", f"{verb} 2")
        assert (await wanted(made)).cordoned


@played(controllers=2)
async def test_a_repeat_of_an_existing_request_does_not_undo_its_reversal(made: World) -> None:
    await again(made, "cordon", "someone else's")
    await again(made, "cordon", "a")
    await again(made, "uncordon", "b")
    await again(made, "cordon", "a")
    assert (await wanted(made)).idle


@played(nodes=2)
async def test_a_fence_that_comes_late_fences_no_node_that_came_back(made: World) -> None:
    await asyncio.sleep(30)
    await again(made, "fence", "a", confirm="pulled the plug")
    assert (await wanted(made)).fenced is not None
    await made.hear(node("n1"))
    await again(made, "unfence", "b")
    await asyncio.sleep(30)
    await again(made, "fence", "a", confirm="pulled the plug")
    assert (await wanted(made)).fenced is None
    await again(made, "fence", "c", confirm="again")
    await made.hear(node("n1"))
    await again(made, "unfence", "b")
    assert (await wanted(made)).fenced is not None


@played()
async def test_a_node_that_joined_again_is_not_forgotten_by_a_late_request(made: World) -> None:
    await made.host.put(subjects.join_nonce("n1"), b"x")
    await again(made, "cordon", "a")
    await asyncio.sleep(30)
    assert (await again(made, "forget", "b"))["node"] == "n1"
    assert (await wanted(made)).idle
    assert (await refused(made.ask("get", resource="node", node="n1"))).code == 404
    await made.host.put(subjects.join_nonce("n1"), b"y")
    await made.hear(node("n1"))
    await asyncio.sleep(30)
    await again(made, "forget", "b")
    there = await made.host.get(subjects.join_nonce("n1"))
    assert there is not None
    assert there.kind is EntryKind.PUT


@played()
async def test_a_node_spec_survives_its_controller_and_a_new_list(made: World) -> None:
    await detail(made, "cordon")
    made.buses["c1"].disconnect()
    await settle()
    made.buses["c1"].reconnect()
    await settle()
    assert (await detail(made, "get")).node.node_spec is not None
    assert (await made.vm("create", name="web", image="tiny")).node == "_"


@played()
async def test_an_uncordon_that_a_controller_missed_is_learnt_from_its_next_list(
    made: World,
) -> None:
    await detail(made, "cordon")
    made.buses["c1"].disconnect()
    await settle()
    await made.host.purge(subjects.node_spec("n1"))
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
                if isinstance(item, Entry) and item.key == subjects.node_spec("n2"):
                    assert read(NodeSpec, item.value).idle
                else:
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
async def test_a_node_with_an_unreadable_spec_is_forgotten_whole(made: World) -> None:
    await made.host.put(subjects.join_nonce("n2"), encode(JoinNonce(nonce="x")))
    await made.host.put(subjects.node_spec("n2"), b"\xc1")
    await asyncio.sleep(60)  # n2 is silent
    await made.hear(node("n1"))
    await forget(made)
    assert (await wanted(made, "n2")).idle
    assert "n2" not in made.controllers["c1"]._fleet.nodes


@played()
async def test_a_silent_node_has_its_consumers_until_it_is_forgotten(made: World) -> None:
    await made.host.put(subjects.join_nonce("n2"), encode(JoinNonce(nonce="x")))
    await asyncio.sleep(60)  # n2 is silent
    await made.hear(node("n1"))
    await settle()
    assert made.controllers["c1"]._nodes_here() == {"n1", "n2"}
    await forget(made)
    await settle()
    assert made.controllers["c1"]._nodes_here() == {"n1"}


@played(controllers=2)
async def test_a_node_that_is_off_since_before_the_controllers_is_shown_and_fenced(
    made: World,
) -> None:
    await made.host.put(subjects.join_nonce("n2"), encode(JoinNonce(nonce="x")))
    await settle()
    assert (await detail(made, "get", "n2")).node.state is NodeState.RECOVERING
    want = {"resource": "node", "node": "n2", "confirm": "its power is off"}
    assert (await refused(made.ask("fence", **want))).reason == "node_answers"
    await asyncio.sleep(30)
    await made.hear(node("n1"))
    page = validate(NodePage, await made.ask("list", resource="node"))
    assert [(one.node, one.state) for one in page.items] == [
        ("n1", NodeState.READY),
        ("n2", NodeState.DOWN),
    ]
    assert page.alarms == ()
    assert (await made.vm("create", name="web", image="tiny")).node == "n1"
    await detail(made, "cordon", "n2")
    assert (await wanted(made, "n2")).cordoned
    fenced = (await detail(made, "fence", "n2", confirm="its power is off")).node.node_spec
    assert fenced is not None
    assert fenced.fenced is not None
    assert (await refused(made.ask("unfence", resource="node", node="n2"))).reason == "node_silent"
    await made.hear(node("n2"))
    await settle()
    back = (await detail(made, "unfence", "n2")).node.node_spec
    assert back is not None
    assert back.fenced is None


@played()
async def test_a_join_record_that_a_new_list_lacks_is_no_node(made: World) -> None:
    await made.host.put(subjects.join_nonce("n2"), encode(JoinNonce(nonce="x")))
    await settle()
    made.buses["c1"].disconnect()
    await settle()
    await made.host.purge(subjects.join_nonce("n2"))
    made.server.expire()
    made.buses["c1"].reconnect()
    await settle()
    assert (await refused(made.ask("get", resource="node", node="n2"))).code == 404


@played()
async def test_an_unknown_node_is_404_and_a_joined_one_is_shown(made: World) -> None:
    for verb in ("get", "cordon", "uncordon"):
        error = await refused(made.ask(verb, resource="node", node="n9"))
        assert (error.code, error.reason) == (404, "node_not_found")
    await made.hear(node("n9"))
    await settle()
    assert (await detail(made, "get", "n9")).node.node == "n9"
