"""Watches of clients, in virtual time: pages, changes, heartbeats, renewal, and resuming."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, node, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world

from virtbus.bus.client.owners import REQUEST_INFO
from virtbus.controller.edge.watch_sender import BEAT_S
from virtbus.controller.edge.watch_server import PAGE, RENEW_S, Position
from virtbus.schemas import subjects
from virtbus.schemas.api import VmCreated, WatchReply
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import NameClaim
from virtbus.schemas.wire import encode, validate


async def read(replies: AsyncIterator[Any]) -> WatchReply:
    return validate(WatchReply, await anext(replies))


async def listed(replies: AsyncIterator[Any]) -> tuple[list[str], WatchReply]:
    """Return the names of the first list, and the reply that ended it."""
    names: list[str] = []
    while True:
        reply = await read(replies)
        if reply.synced:
            return names, reply
        assert reply.items is not None
        assert len(reply.items) <= PAGE
        names += [item.name for item in reply.items]


async def news(replies: AsyncIterator[Any]) -> WatchReply:
    """Return the next reply except heartbeats."""
    while True:
        reply = await read(replies)
        if not reply.beat:
            return reply


@played()
async def test_a_watch_lists_in_pages_and_then_reports_changes(made: World) -> None:
    await made.hear(node("n1", cpus=64, memory_bytes=256 * GIB))
    await settle()
    for number in range(PAGE + 5):
        await made.ask("create", name=f"vm{number:03}", image="tiny", uid=uid(number))
    async with made.watch() as replies:
        names, end = await listed(replies)
        assert names == [f"vm{number:03}" for number in range(PAGE + 5)]
        assert end.renew
        stored = await made.stored(uid(3))
        assert stored is not None
        await made.say(status(stored, VmState.RUNNING))
        reply = await news(replies)
        assert reply.change is not None
        assert (reply.change.uid, reply.change.state) == (uid(3), VmState.RUNNING)


@played()
async def test_a_create_and_its_first_change_show_the_same_vm(made: World) -> None:
    await made.hear(node("n1"))
    async with made.watch() as replies:
        await listed(replies)
        created = validate(VmCreated, await made.ask("create", name="web", image="tiny"))
        assert (await news(replies)).change == created.vm
        stored = await made.stored(created.vm.uid)
        assert stored is not None
        repeated = await made.ask("create", name="web", image="tiny", uid=created.vm.uid)
        assert not repeated["created"]
        await made.say(status(stored, VmState.RUNNING))
        reply = await news(replies)
        assert reply.change is not None
        assert reply.change.state is VmState.RUNNING


@played()
async def test_a_deleted_vm_is_gone_once(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    async with made.watch() as replies:
        await listed(replies)
        await made.ask("delete", uid=uid(1), grace_s=0)
        reply = await news(replies)
        assert reply.change is not None
        assert reply.change.state is VmState.DELETING
        stored = await made.stored(uid(1))
        assert stored is not None
        await made.say(status(stored, VmState.DELETING, released=True))
        while (reply := await news(replies)).gone is None:
            assert reply.change is not None
        assert reply.gone == uid(1)
        assert (await read(replies)).beat


@played()
async def test_a_watch_of_one_vm_reports_no_other(made: World) -> None:
    await made.ask("create", name="db", image="tiny", uid=uid(2))
    async with made.watch(name="web") as replies:
        assert (await listed(replies))[0] == []
        await made.ask("stop", name="db")
        await made.ask("create", name="web", image="tiny", uid=uid(1))
        reply = await news(replies)
        assert reply.change is not None
        assert reply.change.name == "web"


@played()
async def test_a_vm_that_leaves_the_filter_is_gone_for_the_watcher(made: World) -> None:
    one = await made.vm("create", name="web", image="tiny", uid=uid(1), labels={"app": "a"})
    async with made.watch(labels={"app": "a"}) as replies:
        assert (await listed(replies))[0] == ["web"]
        await made.ask("update", uid=uid(1), revision=one.revision, labels={"app": "b"})
        assert (await news(replies)).gone == uid(1)


@played()
async def test_a_quiet_watch_sends_heartbeats(made: World) -> None:
    async with made.watch() as replies:
        await listed(replies)
        start_s = asyncio.get_running_loop().time()
        for number in range(1, 4):
            assert (await read(replies)).beat
            now_s = asyncio.get_running_loop().time()
            assert now_s - start_s == pytest.approx(number * BEAT_S, abs=0.01)


@played()
async def test_a_busy_fleet_does_not_delay_the_heartbeat_of_a_narrow_watch(made: World) -> None:
    await made.ask("create", name="db", image="tiny", uid=uid(2))
    async with made.watch(name="web") as replies, asyncio.TaskGroup() as group:
        await listed(replies)

        async def bustle() -> None:
            while True:
                await made.ask("stop", name="db")
                await asyncio.sleep(1)

        busy = group.create_task(bustle())
        start_s = asyncio.get_running_loop().time()
        assert (await read(replies)).beat
        assert asyncio.get_running_loop().time() - start_s <= BEAT_S + 1
        busy.cancel()


@played()
async def test_a_watch_ends_unless_it_is_renewed(made: World) -> None:
    loop = asyncio.get_running_loop()
    async with made.watch() as replies:
        _, end = await listed(replies)
        await asyncio.sleep(RENEW_S - 1)
        await made.client.publish(end.renew, {})
        await asyncio.sleep(RENEW_S - 1)
        assert len(made.controllers["c1"]._watches._watchers) == 1
        renewed_s = loop.time() - (RENEW_S - 1)
        await asyncio.sleep(2)
        assert made.controllers["c1"]._watches._watchers == {}
        assert loop.time() - renewed_s < RENEW_S + 2


@played(controllers=2)
async def test_two_controllers_give_two_watches_their_own_renewal(made: World) -> None:
    async with made.watch() as one, made.watch() as two:
        first, second = (await listed(one))[1].renew, (await listed(two))[1].renew
        assert first != second


# --- resuming --------------------------------------------------------------------------------
@played(controllers=2)
async def test_a_resumed_watch_reports_only_changes(made: World) -> None:
    for number, name in enumerate(("a", "b", "c"), start=1):
        await made.ask("create", name=name, image="tiny", uid=uid(number))
    await settle()
    async with made.watch() as replies:
        _, end = await listed(replies)
    await made.ask("stop", name="a")
    await made.ask("delete", name="b", grace_s=0)
    gone = await made.stored(uid(2))
    assert gone is not None
    await made.say(status(gone, VmState.DELETING, released=True))
    await settle()
    async with made.watch(after=end.after) as replies:
        names, _ = await listed(replies)
        assert names == []
        told = [await news(replies) for _ in range(2)]
    changed = {reply.change.name for reply in told if reply.change}
    assert (changed, {reply.gone for reply in told if reply.gone}) == ({"a"}, {uid(2)})


@played()
async def test_a_resumed_watch_reports_what_left_its_filter_meanwhile(made: World) -> None:
    about = {"image": "tiny", "labels": {"app": "a"}}
    one = await made.vm("create", name="web", uid=uid(1), **about)
    other = await made.vm("create", name="web", uid=uid(2), namespace="shop", **about)
    filters = {"labels": {"app": "a"}, "namespace": "default"}
    async with made.watch(**filters) as replies:
        names, end = await listed(replies)
        assert names == ["web"]
    for vm in (one, other):
        await made.ask("update", uid=vm.uid, revision=vm.revision, labels={"app": "b"})
    await settle()
    async with made.watch(after=end.after, **filters) as replies:
        await listed(replies)
        assert (await news(replies)).gone == uid(1)
        assert (await read(replies)).beat, "the client's filter never covered the other VM"


@played()
async def test_a_position_behind_a_purged_claim_is_reached(made: World) -> None:
    """The last revision that a client saw may be that of a claim, which changes no VM."""
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    await settle()
    fleet = made.controllers["c1"]._fleet
    ahead = Position(fleet.revision + 1, 0, 2_000_000_000)
    async with made.watch(after=str(ahead)) as replies, asyncio.TaskGroup() as group:
        waiting = group.create_task(_synced(replies))
        await settle()
        claim = subjects.name_claim("shop", "db")
        await made.host.put(claim, encode(NameClaim(uid=uid(5))))
        await waiting


async def _synced(replies: AsyncIterator[Any]) -> None:
    await listed(replies)


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ("1000000-0-2000000000", Code.GONE),
        ("0-0-0", Code.GONE),
        ("0-0-1", Code.GONE),
        ("x", Code.INVALID),
        ("1-2-3-4", Code.INVALID),
        ("", Code.INVALID),
    ],
)
def test_a_position_that_cannot_be_resumed_is_refused(after: str, code: Code) -> None:
    async def body() -> None:
        async with world() as made:
            await made.ask("create", name="web", image="tiny")
            async with made.watch(after=after) as replies:
                error = await refused(listed(replies))
            assert error.code == code

    run(body)


@played()
async def test_a_position_before_forgotten_deletes_is_refused(made: World) -> None:
    await made.ask("create", name="web", image="tiny")
    made.controllers["c1"]._fleet.forgotten_revision = 10_000
    async with made.watch(after="1-0-2000000000") as replies:
        with pytest.raises(VirtbusError) as caught:
            await listed(replies)
    assert caught.value.code == Code.GONE


@played()
async def test_a_restarted_controller_reports_no_deleted_vms(made: World) -> None:
    """Purge markers of claims and the join nonce are no deleted VMs."""
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    await made.ask("delete", name="web", grace_s=0)
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.DELETING, released=True))
    await settle()
    made.buses["c1"].disconnect()
    made.controllers["c1"]._fleet.gone.clear()
    made.buses["c1"].reconnect()
    await settle()
    async with made.watch(after="1-0-2000000000") as replies:
        await listed(replies)
        assert (await news(replies)).gone == uid(1)
        assert (await read(replies)).beat


def test_a_node_that_falls_silent_is_seen_in_a_list_later() -> None:
    async def body() -> None:
        async with world() as made:
            one = await made.vm("create", name="web", image="tiny", uid=uid(1))
            stored = await made.stored(one.uid)
            assert stored is not None
            await made.say(status(stored))
            await settle()
            assert (await made.vm("get", uid=uid(1))).state is VmState.RUNNING
            await asyncio.sleep(30)
            assert (await made.vm("get", uid=uid(1))).state is VmState.UNKNOWN
            await made.hear(node("n1"))
            await settle()
            assert (await made.vm("get", uid=uid(1))).state is VmState.RUNNING

    run(body)


def test_positions_read_back() -> None:
    position = Position(5, 7, 1_790_000_000)
    assert Position.parse(str(position)) == position


@played()
async def test_only_the_account_that_opened_a_watch_can_renew_it(made: World) -> None:
    watches = made.controllers["c1"]._watches
    async with made.watch() as replies:
        _, end = await listed(replies)
        stranger = {REQUEST_INFO: json.dumps({"acc": "OBSERVER"})}
        for _ in range(3):
            await asyncio.sleep(RENEW_S / 3 - 0.5)
            assert len(watches._watchers) == 1
            await made.client._link.send(end.renew, b"", headers=stranger)
        await asyncio.sleep(2)
        assert watches._watchers == {}


async def ended(replies: AsyncIterator[Any]) -> VirtbusError:
    async def rest() -> None:
        async for _ in replies:
            pass

    return await refused(rest())


@played()
async def test_abandoned_watches_make_room_for_new_ones_of_their_account(made: World) -> None:
    most = made.controllers["c1"]._settings.watches_at_once
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(made.watch()) for _ in range(most)]
        ends = [(await listed(replies))[1] for replies in opened]
        await made.client.publish(ends[0].renew, {})
        await settle()
        async with made.watch() as one_more:
            await listed(one_more)
            assert (await ended(opened[1])).reason == "displaced"
            assert len(made.controllers["c1"]._watches._by_token) == most


@played()
async def test_watches_that_were_renewed_stay_and_a_new_one_is_refused(made: World) -> None:
    most = made.controllers["c1"]._settings.watches_at_once
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(made.watch()) for _ in range(most)]
        for replies in opened:
            await made.client.publish((await listed(replies))[1].renew, {})
        await settle()
        async with made.watch() as one_more:
            assert (await ended(one_more)).reason == "busy"
        assert len(made.controllers["c1"]._watches._by_token) == most


@played()
async def test_renewals_have_tokens_that_do_not_follow_from_each_other(made: World) -> None:
    tokens = set()
    for _ in range(3):
        async with made.watch() as replies:
            tokens.add((await listed(replies))[1].renew.rpartition(".")[2])
    assert len(tokens) == 3
    assert all(len(one) == 36 for one in tokens)


@played()
async def test_a_change_touches_the_watches_of_its_namespace_only(made: World) -> None:
    watches = made.controllers["c1"]._watches
    async with made.watch(namespace="a") as one, made.watch(namespace="b") as two:
        await listed(one)
        await listed(two)
        held = {key: next(iter(group)) for key, group in watches._watchers.items()}
        await made.ask("create", name="web", image="tiny", namespace="a", uid=uid(1))
        await settle()
        held["a"].dirty.clear()
        held["b"].dirty.clear()
        watches.changed(uid(1))
        assert [list(held[key].dirty) for key in ("a", "b")] == [[uid(1)], []]
