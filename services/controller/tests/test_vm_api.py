"""The API as a client sees it: a real controller over the fake bus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from services.controller.tests.fleets import node, status, uid
from services.controller.tests.virtual import World, run, settle, world

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Entry
from virtbus.bus.errors import OutcomeUnknownError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import NameClaim
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import encode, validate

Scenario = Callable[[World], Awaitable[None]]


def played(**how: int) -> Callable[[Scenario], Callable[[], None]]:
    """Make a scenario of one world a test in virtual time."""

    def wrap(scenario: Scenario) -> Callable[[], None]:
        def test() -> None:
            async def body() -> None:
                async with world(**how) as made:
                    await scenario(made)

            run(body)

        test.__name__ = scenario.__name__
        test.__doc__ = scenario.__doc__
        return test

    return wrap


async def refused(asking: Awaitable[Any]) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await asking
    return caught.value


@played()
async def test_a_create_returns_the_vm_and_emits_events(made: World) -> None:
    answer = await made.ask("create", name="web", image="tiny", uid=uid(1))
    assert answer["created"] is True
    assert (answer["vm"]["node"], answer["vm"]["state"]) == ("n1", "Scheduled")
    stored = await made.stored(uid(1))
    assert stored is not None
    assert (stored.name, stored.epoch, stored.generation) == ("web", 1, 1)
    kinds = [m.subject.split(".", 4)[4] for m in await made.client.history("virtbus.evt.>")]
    assert [k for k in kinds if k.startswith("vm.")] == ["vm.accepted", "vm.scheduled"]


@played()
async def test_a_create_without_a_uid_gets_one(made: World) -> None:
    first = await made.vm("create", name="a", image="tiny")
    second = await made.vm("create", name="b", image="tiny")
    assert first.uid < second.uid
    assert first.uid[14] == "7"


@played()
async def test_a_repeated_create_is_the_same_vm_and_one_fact(made: World) -> None:
    request = {"name": "web", "image": "tiny", "uid": uid(1)}
    first = await made.ask("create", **request)
    again = await made.ask("create", **request)
    assert (first["created"], again.get("created", False)) == (True, False)
    assert first["vm"]["revision"] == again["vm"]["revision"]
    facts = await made.client.history("virtbus.evt.>")
    assert len([m for m in facts if m.subject.endswith("vm.accepted")]) == 1


@played()
async def test_the_same_vm_under_another_uid_is_answered_with_its_own_uid(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    error = await refused(made.ask("create", name="web", image="tiny", uid=uid(2)))
    assert (error.code, error.reason) == (409, "exists_unchanged")
    assert uid(1) in str(error)


@played()
async def test_a_repeat_succeeds_where_no_node_has_room_any_more(made: World) -> None:
    request = {"name": "web", "image": "tiny", "uid": uid(1)}
    await made.ask("create", **request)
    await made.hear(node("n1", state=NodeState.DRAINING))
    await settle()
    assert (await made.vm("create", **request)).node == "n1"


@played(nodes=2)
async def test_a_burst_is_spread_before_its_echo_comes(made: World) -> None:
    nodes = [(await made.vm("create", name=f"vm{i}", image="tiny")).node for i in range(6)]
    assert sorted(nodes) == ["n1"] * 3 + ["n2"] * 3


@played()
async def test_a_nearly_full_bus_takes_deletes_and_no_creates(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    made.controllers["c1"]._storage.fill = 0.81
    error = await refused(made.ask("create", name="db", image="tiny"))
    assert (error.code, error.reason) == (429, "bus_full")
    assert error.body.after_ms
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    assert (await made.vm("delete", name="web")).deleting


# --- reading ---------------------------------------------------------------------------------
@played()
async def test_a_vm_is_found_by_name_and_by_uid(made: World) -> None:
    one = await made.vm("create", name="web", image="tiny", namespace="shop")
    for ref in ({"uid": one.uid}, {"name": "web", "namespace": "shop"}):
        assert (await made.vm("get", **ref)).uid == one.uid
    for ref in ({"uid": uid(9)}, {"name": "web"}, {"name": "db", "namespace": "shop"}):
        error = await refused(made.ask("get", **ref))
        assert (error.code, error.reason) == (404, "vm_not_found")
    assert (await refused(made.ask("get"))).code == 400


@played(controllers=2)
async def test_a_name_is_found_though_the_cache_knows_an_earlier_holder(made: World) -> None:
    """One controller lags: it must ask the leader for the current holder of the name."""
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    fleet = made.controllers["c1"]._fleet
    second = await made.vm("create", name="db", image="tiny", uid=uid(2))
    for one in made.controllers.values():
        one._fleet.names["default", "db"] = uid(7)
    assert fleet.names["default", "db"] == uid(7)
    assert (await made.vm("get", name="db")).uid == second.uid


@played()
async def test_a_list_comes_in_pages_that_join_to_the_whole(made: World) -> None:
    for number in range(7):
        labels = {"odd": str(number % 2)}
        await made.ask("create", name=f"vm{number}", image="tiny", labels=labels)
    names: list[str] = []
    more: dict[str, Any] = {}
    pages = 0
    while True:
        page = await made.ask("list", limit=3, **more)
        names += [item["name"] for item in page.get("items", ())]
        pages += 1
        if not page.get("continue"):
            break
        more = {"continue": page["continue"]}
    assert (names, pages) == ([f"vm{n}" for n in range(7)], 3)
    odd = await made.ask("list", labels={"odd": "1"})
    assert [item["name"] for item in odd["items"]] == ["vm1", "vm3", "vm5"]
    assert (await made.ask("list", namespace="shop")).get("items", []) == []


@pytest.mark.parametrize("token", ["", "x", "%%%", "YQ==", "YS9i", "ü", "=" * 200])
def test_a_continue_of_somebody_else_is_refused(token: str) -> None:
    async def body() -> None:
        async with world() as made:
            error = await refused(made.ask("list", **{"continue": token}))
            assert error.code == 400

    run(body)


@pytest.mark.parametrize(
    ("verb", "data"),
    [
        ("create", {"name": "A.b"}),
        ("create", []),
        ("get", {"uid": "x"}),
        ("get", {"name": "*"}),
        ("list", {"limit": 0}),
        ("list", {"limit": True}),
        ("update", {"name": "web"}),
        ("delete", {"name": "web", "grace_s": -1}),
        ("delete", {"nmae": "web"}),
        ("watch", {"after": "yesterday"}),
        ("watch", {"after": "1-2"}),
        ("events", {"limit": 5000}),
    ],
)
def test_wrong_requests_are_400_and_the_next_one_is_served(verb: str, data: Any) -> None:
    async def body() -> None:
        async with world() as made:
            subject = subjects.api("vm", verb)
            error = await refused(made.client.request(subject, data, timeout_s=5))
            assert error.code == 400
            assert (await made.vm("create", name="web", image="tiny")).name == "web"

    run(body)


# --- changing --------------------------------------------------------------------------------
@played()
async def test_an_update_needs_the_revision_that_was_read(made: World) -> None:
    one = await made.vm("create", name="web", image="tiny", uid=uid(1))
    spec = one.spec.model_copy(update={"termination_grace_s": 5}).model_dump(mode="json")
    after = await made.vm("update", uid=uid(1), revision=one.revision, spec=spec)
    assert (after.generation, after.spec.termination_grace_s) == (2, 5)
    error = await refused(made.ask("update", uid=uid(1), revision=one.revision, labels={}))
    assert (error.code, error.reason) == (409, "stale_revision")
    labelled = await made.vm("update", uid=uid(1), revision=after.revision, labels={"a": "b"})
    assert (labelled.labels, labelled.generation) == ({"a": "b"}, 2)


@played()
async def test_a_protected_vm_is_not_deleted_until_that_is_cleared(made: World) -> None:
    spec = {"protected": True}
    one = await made.vm("create", name="web", image="tiny", uid=uid(1), spec=spec)
    error = await refused(made.ask("delete", name="web"))
    assert (error.code, error.reason) == (409, "protected")
    assert "virtbus vm update web --no-protected -n default" in error.body.message
    cleared = one.spec.model_copy(update={"protected": False}).model_dump(mode="json")
    await made.vm("update", uid=uid(1), revision=one.revision, spec=cleared)
    assert (await made.vm("delete", name="web")).state is VmState.DELETING


@played()
async def test_start_stop_and_delete_may_be_repeated(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    assert not (await made.vm("stop", name="web", grace_s=3)).powered
    assert not (await made.vm("stop", name="web")).powered
    assert (await made.vm("start", name="web")).powered
    first = await made.vm("delete", name="web")
    again = await made.vm("delete", name="web")
    assert first.state is VmState.DELETING
    assert again.revision == first.revision
    assert (await made.vm("delete", name="web", grace_s=0)).revision > first.revision
    for verb in ("start", "stop"):
        assert (await refused(made.ask(verb, name="web"))).reason == "deleting"


@played(controllers=2)
async def test_two_controllers_change_one_vm_and_lose_nothing(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    for _ in range(10):
        await made.ask("stop", name="web")
        await made.ask("start", name="web")
    stored = await made.stored(uid(1))
    assert stored is not None
    assert (stored.powered, stored.power_epoch) == (True, 20)


# --- end -------------------------------------------------------------------------------------
async def released_by_node(made: World, **more: Any) -> None:
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.DELETING, **({"released": True} | more)))
    await settle()


@played(controllers=3)
async def test_a_delete_ends_after_its_nodes_release_and_is_reported_once(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1), user_data="#cloud-config\n")
    await released_by_node(made)
    assert await made.stored(uid(1)) is not None, "nobody asked for a delete"
    await made.ask("delete", uid=uid(1))
    await released_by_node(made)
    assert await made.stored(uid(1)) is None
    assert (await refused(made.ask("get", uid=uid(1)))).code == 404
    facts = [m.subject.split(".", 4)[4] for m in await made.client.history("virtbus.evt.>")]
    assert facts.count("vm.deleted") == 1
    claim = await made.host.get(subjects.name_claim("default", "web"))
    secret = await made.host.get(subjects.vm_secret("n1", uid(1)))
    assert claim is not None
    assert secret is not None
    assert (claim.value, secret.value) == (b"", b"")
    assert (await made.vm("create", name="web", image="tiny", uid=uid(2))).uid == uid(2)


@played()
async def test_another_nodes_status_ends_no_delete(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    await made.ask("delete", uid=uid(1))
    await released_by_node(made, node="n2", epoch=9)
    assert await made.stored(uid(1)) is not None


@played()
async def test_a_status_of_an_older_epoch_ends_no_delete(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    await made.ask("delete", uid=uid(1))
    await released_by_node(made, epoch=0)
    assert await made.stored(uid(1)) is not None


@played()
async def test_a_restarted_controller_finishes_deletes_of_released_vms(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    await made.ask("delete", uid=uid(1))
    bus = made.buses["c1"]
    bus.disconnect()
    await released_by_node(made)
    assert await made.stored(uid(1)) is not None
    bus.reconnect()
    await settle()
    assert await made.stored(uid(1)) is None


@played()
async def test_unreadable_values_stop_nothing(made: World) -> None:
    """MSG-16, and possible writes of a compromised node below its own prefix."""
    bus = MemoryBus(made.server)
    for key in ("$KV.vm.n1.x", "$KV.vm._name.default.x", "$KV.st.n1.x", "$KV.node.n1"):
        for value in (b"\xc1", b"\x01", b"\x80", b"{"):
            await bus.put(key, value)
    for key in ("$KV.st.n1.a.b.c", "$KV.st.n1", "$KV.vm.n1", "$KV.vm.n1.a.b.c.d"):
        await bus.put(key, b"\x80")
        await bus.purge(key)
    await settle()
    assert (await made.vm("create", name="web", image="tiny")).name == "web"


@played()
async def test_an_orphan_claim_is_swept_after_its_grace(made: World) -> None:
    claim = subjects.name_claim("default", "web")
    await made.host.put(claim, encode(NameClaim(uid=uid(8))))
    await settle()
    endings = made.controllers["c1"]._endings
    assert await endings.sweep(grace_s=60) == 0
    assert await endings.sweep(grace_s=0) == 1
    left = await made.host.get(claim)
    assert left is not None
    assert left.value == b""


@played()
async def test_requests_that_waited_in_a_stopped_controller_are_not_executed(made: World) -> None:
    """The client may have retried elsewhere: a late create would belong to nobody (F41)."""
    await asyncio.sleep(5)
    loop = asyncio.get_running_loop()
    loop._jump.now_s += 30  # type: ignore[attr-defined]  # SIGSTOP, on the virtual clock
    error = await refused(made.ask("create", name="web", image="tiny", uid=uid(1)))
    assert (error.code, error.reason) == (503, "stalled")
    assert await made.stored(uid(1)) is None
    await asyncio.sleep(3)
    assert (await made.vm("create", name="web", image="tiny", uid=uid(1))).name == "web"


@played()
async def test_a_request_is_not_executed_after_its_deadline(
    made: World,
) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    bus = made.buses["c1"]
    read = bus.get

    async def slowly(key: str) -> Entry | None:
        await asyncio.sleep(11)
        return await read(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus, "get", slowly)
        with pytest.raises(OutcomeUnknownError):
            await made.ask("stop", uid=uid(1))
        await asyncio.sleep(30)
    record = await made.stored(uid(1))
    assert record is not None
    assert record.powered


@played()
async def test_a_stopped_create_is_not_finished_after_its_client_went_elsewhere(
    made: World,
) -> None:
    """It was refused for a name that is free again since: nobody waits for this VM."""
    bus = made.buses["c1"]
    write = bus.put

    async def stopped(key: str, value: bytes, **how: Any) -> int:
        if key.startswith("$KV.vm._name."):
            await asyncio.sleep(20)
        return await write(key, value, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus, "put", stopped)
        with pytest.raises(OutcomeUnknownError):
            await made.ask("create", name="web", image="tiny", uid=uid(1))
        await asyncio.sleep(30)
    assert await made.stored(uid(1)) is None
    assert (await made.vm("create", name="web", image="tiny", uid=uid(2))).name == "web"


@played()
async def test_a_request_that_comes_again_is_answered_and_changes_nothing(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))

    async def ask(verb: str, request_id: str) -> VmView:
        subject = subjects.api("vm", verb)
        data = {"uid": uid(1)}
        answer = await made.client.request(subject, data, timeout_s=10, request_id=request_id)
        return validate(VmView, answer)

    assert not (await ask("stop", "a")).powered
    assert (await ask("start", "b")).powered
    assert (await ask("stop", "a")).powered
    assert not (await ask("stop", "c")).powered
