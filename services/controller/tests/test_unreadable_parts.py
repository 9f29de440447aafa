"""Unreadable values other than records: claims, statuses, sums, specs of nodes, joins, events."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_unreadable import (
    RECORD,
    WEB,
    alarms,
    damage,
    fleet,
    go_on,
    prepared,
)
from services.controller.tests.test_vm_api import refused
from services.controller.tests.virtual import World, run

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.claims import UidState
from virtbus.controller.core.rebuild_plan import Known, RebuildAction, step_of
from virtbus.controller.core.unreadable import CONDITION, Damaged, Unreadable
from virtbus.controller.edge.reservations import Reservations
from virtbus.schemas import subjects
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.vm import NameClaim, VmRecord
from virtbus.schemas.wire import encode, read

GARBAGE = b"\xc1 no msgpack"
CLAIM = subjects.name_claim("default", "web")
NOBODYS = subjects.name_claim("default", "nobody")


Scenario = Callable[[World, MemoryServer], Awaitable[None]]


async def stored(made: World, of: str) -> VmRecord:
    found = await made.stored(of)
    assert found is not None
    return found


async def at(made: World, key: str) -> Entry:
    entry = await made.client.get(key)
    assert entry is not None
    return entry


def played(scenario: Scenario) -> Callable[[], None]:
    """Play a scenario of a fleet with two VMs and the server below it."""

    def test() -> None:
        server = MemoryServer()

        async def body() -> None:
            async with fleet(server) as made:
                await prepared(made)
                await scenario(made, server)

        run(body)

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@played
async def test_a_damaged_claim_is_rewritten_for_the_vm_with_that_name(
    made: World, server: MemoryServer
) -> None:
    damage(server, CLAIM, GARBAGE)
    await go_on(made, 130)
    entry = await at(made, CLAIM)
    assert read(NameClaim, entry.value).uid == WEB
    assert await alarms(made) == "" or CLAIM not in await alarms(made)


@played
async def test_a_vm_whose_claim_is_damaged_is_deleted_and_its_name_is_free(
    made: World, server: MemoryServer
) -> None:
    damage(server, CLAIM, GARBAGE)
    assert (await made.vm("delete", name="web")).deleting
    await made.say(status(await stored(made, WEB), released=True))
    await go_on(made, 5)
    assert (await made.vm("create", name="web", image="tiny")).name == "web"


@played
async def test_a_damaged_claim_without_a_vm_is_reported_and_freed_by_name(
    made: World, server: MemoryServer
) -> None:
    damage(server, NOBODYS, GARBAGE)
    await go_on(made, 200)
    error = await refused(made.vm("create", name="nobody", image="tiny"))
    assert (error.reason, "vm delete" in str(error)) == ("unreadable", True)
    assert (await made.vm("delete", name="nobody")).name == "nobody"
    assert (await made.vm("create", name="nobody", image="tiny")).name == "nobody"


@played
async def test_a_damaged_status_is_shown_with_the_last_good_one(
    made: World, server: MemoryServer
) -> None:
    damage(server, subjects.vm_status("n1", WEB), GARBAGE)
    await go_on(made, 1)
    view = await made.vm("get", uid=WEB)
    assert (view.state, [one.type for one in view.conditions]) == ("Running", [CONDITION])
    assert "status cannot be read" in view.conditions[0].message
    await made.say(status(await stored(made, WEB)))
    await go_on(made, 1)
    assert (await made.vm("get", uid=WEB)).conditions == ()


@played
async def test_a_damaged_status_without_a_vm_is_removed_by_uid(
    made: World, server: MemoryServer
) -> None:
    key = subjects.vm_status("n1", uid(8))
    damage(server, key, GARBAGE)
    await go_on(made, 200)
    assert key in await alarms(made)
    assert (await made.vm("delete", uid=uid(8))).uid == uid(8)
    assert (await at(made, key)).kind is EntryKind.PURGE
    await go_on(made, 1)
    assert key not in await alarms(made)
    assert (await refused(made.vm("delete", uid=uid(8)))).code == 404


@played
async def test_a_delete_is_answered_though_the_agent_removes_the_damaged_status_first(
    made: World, server: MemoryServer
) -> None:
    key = subjects.vm_status("n1", WEB)
    damage(server, RECORD, GARBAGE)
    damage(server, key, GARBAGE)
    await go_on(made, 1)
    purge, lost = MemoryBus.purge, list[str]()

    async def after_another(bus: MemoryBus, of: str, **how: Any) -> int:
        if of == key and not lost:
            lost.append(of)
            await purge(made.host, key)  # its agent was first
            await go_on(made, 1)
        return await purge(bus, of, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemoryBus, "purge", after_another)
        assert (await made.vm("delete", name="web")).name == "web"
    assert lost == [key]
    for gone in (RECORD, key, CLAIM):
        assert (await at(made, gone)).kind is EntryKind.PURGE


@played
async def test_a_damaged_status_of_a_deleted_vm_is_swept(made: World, server: MemoryServer) -> None:
    await made.vm("delete", uid=WEB)
    await made.say(status(await stored(made, WEB), released=True))
    await go_on(made, 5)
    key = subjects.vm_status("n1", WEB)
    damage(server, key, GARBAGE)
    await go_on(made, 200)
    assert (await at(made, key)).kind is EntryKind.PURGE


@played
async def test_a_record_that_is_written_back_during_its_removal_keeps_its_secrets(
    made: World, server: MemoryServer
) -> None:
    good = await at(made, RECORD)
    write = Reservations.write

    async def late(*of: Any) -> int:
        patched.undo()
        await made.host.put(RECORD, good.value)
        return await write(*of)

    damage(server, RECORD, GARBAGE)
    await go_on(made, 200)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reservations, "write", late)
        assert (await refused(made.vm("delete", uid=WEB))).reason == "unreadable"
    assert (await stored(made, WEB)).sec_digest is not None
    assert (await at(made, subjects.vm_secret("n1", WEB))).kind is EntryKind.PUT


@played
async def test_a_drain_skips_a_vm_with_an_unreadable_record(
    made: World, server: MemoryServer
) -> None:
    where = (await stored(made, WEB)).node
    other = "n2" if where == "n1" else "n1"
    damage(server, subjects.vm_record(where, WEB), GARBAGE)
    await go_on(made, 1)
    await made.ask("drain", resource="node", node=where, discard_local_disks=True)
    await go_on(made, 20)
    there = server.shelf("$KV.sec.x").entries
    assert subjects.vm_secret(other, WEB) not in there
    vm = await stored(made, uid(2))
    assert vm.evacuating or vm.node == other


@played
async def test_a_damaged_heartbeat_is_reported_until_it_expires(
    made: World, server: MemoryServer
) -> None:
    key = subjects.node_record("n3")
    damage(server, key, GARBAGE)
    await go_on(made, 1)
    assert key in await alarms(made)
    del server.shelf(key).entries[key]  # this bucket does not report expired keys
    await go_on(made, 31)
    assert key not in await alarms(made)


@played
async def test_a_damaged_sum_is_made_again_from_the_records(
    made: World, server: MemoryServer
) -> None:
    strict = {"placement": {"overcommit": "strict"}, "node_selector": {"host": "n1"}}
    await made.hear(node("n1", labels={"host": "n1"}))
    first = {"name": "one", "image": "tiny", "uid": uid(5), "spec": strict, "cpus": 2}
    assert (await made.vm("create", **first)).node == "n1"
    damage(server, subjects.node_reserved("n1"), GARBAGE)
    await made.hear(node("n1", labels={"host": "n1"}))
    second = {"name": "two", "image": "tiny", "uid": uid(6), "spec": strict, "cpus": 2}
    assert (await made.vm("create", **second)).node == "n1"
    held = server.shelf("$KV.vm.x").last(subjects.node_reserved("n1"))
    assert held is not None
    assert b"vcpus\x04" in held.value


@played
async def test_a_damaged_node_spec_is_replaced_from_the_last_known_one(
    made: World, server: MemoryServer
) -> None:
    await made.ask("cordon", resource="node", node="n2")
    damage(server, subjects.node_spec("n2"), GARBAGE)
    await go_on(made, 1)
    detail = await made.ask("cordon", resource="node", node="n2")
    assert detail["node"]["node_spec"]["cordoned"]
    entry = await at(made, subjects.node_spec("n2"))
    assert read(NodeSpec, entry.value).cordoned
    await go_on(made, 1)
    assert subjects.node_spec("n2") not in await alarms(made)


def test_an_unknown_damaged_node_spec_never_counts_as_uncordoned() -> None:
    """It may have said that the node is fenced: then another node runs its VMs."""
    server, key = MemoryServer(), subjects.node_spec("n2")

    async def body() -> None:
        fence = Fence(by="operator", why="it burns", time_ns=1)
        damage(server, key, encode(NodeSpec(node="n2", fenced=fence)))
        damage(server, key, GARBAGE)
        async with fleet(server) as made:
            await go_on(made, 1)
            for verb in ("cordon", "uncordon", "drain"):
                error = await refused(made.ask(verb, resource="node", node="n2"))
                assert error.reason == "unreadable"
            await made.ask("unfence", resource="node", node="n2")  # it answers, and is ready
            await go_on(made, 1)
            await made.ask("cordon", resource="node", node="n2")

    run(body)


@played
async def test_a_damaged_event_is_reported_and_hides_no_other(
    made: World, server: MemoryServer
) -> None:
    kept = server.stored["EVT"]
    good = len((await made.ask("events", uid=WEB))["items"])
    for body in (GARBAGE, encode({"data": [1]}), encode({"data": {"spans": 3}}), encode([1])):
        subject = subjects.event("n1", WEB, "vm.failed")
        kept.append(type(kept[0])(subject, body, len(kept) + 1, 1))
    items = (await made.ask("events", uid=WEB))["items"]
    assert len(items) == good + 4
    assert all("cannot be shown" in item["data"]["message"] for item in items[good:])


@pytest.mark.parametrize(
    ("place", "step"),
    [("n1", RebuildAction.RAISE), ("n2", RebuildAction.CONFLICT), ("_", RebuildAction.CONFLICT)],
)
def test_a_rebuild_writes_a_record_back_over_one_that_cannot_be_read(
    place: str, step: RebuildAction
) -> None:
    assert step_of(record(1), Known(UidState.UNREADABLE, None, 7, place)).step is step


def test_alarms_name_the_first_and_count_the_rest() -> None:
    damaged = Damaged()
    for number in range(30):
        key = subjects.vm_record("n1", uid(number))
        assert damaged.add(Unreadable(key, 1, 3, "malformed", "no msgpack"))
        assert not damaged.add(Unreadable(key, 1, 3, "malformed", "no msgpack"))
    told = damaged.alarms()
    assert len(told) == 6
    assert "25 more" in told[-1]
