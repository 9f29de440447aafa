"""An unreadable value affects only one VM: it is reported, and a person can remove it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from services.controller.tests.fleets import node, status, uid
from services.controller.tests.test_vm_api import refused
from services.controller.tests.virtual import World, run, settle, world_on

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.unreadable import CONDITION
from virtbus.schemas import bounds, subjects
from virtbus.schemas.api import BusStatus
from virtbus.schemas.errors import Code
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import NameClaim
from virtbus.schemas.wire import encode, validate

WEB, DB, ORPHAN = uid(1), uid(2), uid(9)
ORPHANS_CLAIM = subjects.name_claim("default", "orphan")
RECORD = subjects.vm_record("n1", WEB)
KEYS = {
    "record": RECORD,
    "record without a node": subjects.vm_record("_", uid(7)),
    "claim": subjects.name_claim("default", "web"),
    "claim of no vm": subjects.name_claim("default", "nobody"),
    "join": subjects.join_nonce("n1"),
    "host": subjects.node_host("n1"),
    "images": subjects.node_images("n1"),
    "hosts": subjects.node_hosts("n1"),
    "node_spec": subjects.node_spec("n2"),
    "sum": subjects.node_reserved("n1"),
    "secret": subjects.vm_secret("n1", WEB),
    "secret of no vm": subjects.vm_secret("n1", uid(8)),
    "status": subjects.vm_status("n1", WEB),
    "status of no vm": subjects.vm_status("n1", uid(8)),
    "instance": subjects.node_instance("n1"),
    "rival": subjects.node_rival("n1"),
    "signing key": subjects.signing_key("damaged"),
    "heartbeat": subjects.node_record("n3"),
    "lease": subjects.lease("fleet"),
}
DAMAGES: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda _key: b"\xc1\xff no msgpack",
    "empty": lambda _key: b"",
    "over-size": lambda key: encode({"a": "x" * bounds.bound_of(key).read_bytes}),
    "a list": lambda _key: b"\x93\x01\x02\x03",
    "wrong types": lambda _key: encode({"uid": 7, "node": [], "nonce": {}, "holder": 1}),
    "newer": lambda _key: encode({"schema_version": 99, "uid": WEB, "node": "n1"}),
}


def damage(server: MemoryServer, key: str, value: bytes) -> int:
    """Put bytes at a key that no program of ours would write."""
    return server.shelf(key).apply(key, value).revision


@asynccontextmanager
async def fleet(server: MemoryServer, *, controllers: int = 2) -> AsyncIterator[World]:
    """Controllers, and the nodes n1 and n2 with heartbeats."""
    async with world_on(server, controllers=controllers, nodes=2) as made, background() as tasks:

        async def beat() -> None:
            while True:
                for name in ("n1", "n2"):
                    await made.hear(node(name))
                await asyncio.sleep(4)

        tasks.start(beat())
        yield made


async def prepared(made: World) -> None:
    """Two running VMs, and a claim left by a crash."""
    for number, name in ((1, "web"), (2, "db")):
        await made.vm(
            "create",
            name=name,
            image="tiny",
            uid=uid(number),
            user_data="#!/bin/sh",
            spec={"node_selector": {}, "volumes": []},
        )
        stored = await made.stored(uid(number))
        assert stored is not None
        await made.say(status(stored))
    await made.host.put(ORPHANS_CLAIM, encode(NameClaim(uid=ORPHAN)))


async def go_on(made: World, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await settle()


async def others_are_served(made: World) -> None:
    """Each verb works for another VM; lists and watches are complete; sweeps continue."""
    for _ in range(4):  # of either controller
        assert "db" in {item["name"] for item in (await made.ask("list"))["items"]}
    async with made.watch() as replies:
        seen: set[str] = set()
        async for reply in replies:
            seen |= {item["name"] for item in reply.get("items") or ()}
            if reply.get("synced"):
                break
    assert "db" in seen
    assert (await made.vm("get", name="db")).state is VmState.RUNNING
    assert not (await made.vm("stop", uid=DB)).powered
    assert (await made.vm("start", uid=DB)).powered
    fresh = await made.vm("create", name="fresh", image="tiny", user_data="#!/bin/sh")
    assert (await made.vm("delete", uid=fresh.uid)).deleting
    left = await made.client.get(ORPHANS_CLAIM)
    assert left is None or left.kind is EntryKind.PURGE


async def alarms(made: World) -> str:
    told = validate(BusStatus, await made.ask("status", resource="bus"))
    return "\n".join(told.alarms)


EACH = [
    pytest.param(
        kind,
        how,
        restarted,
        marks=() if turn == (at + 3 * restarted) % len(DAMAGES) else (pytest.mark.long,),
        id=f"{'restarted' if restarted else 'known'}-{how}-{kind}",
    )
    for restarted in (False, True)
    for at, kind in enumerate(KEYS)
    for turn, how in enumerate(DAMAGES)
]
"""Each kind with each damage, known and restarted; all but one damage of a kind are long."""


@pytest.mark.parametrize(("kind", "how", "restarted"), EACH)
def test_a_damaged_value_stops_no_other_vm(kind: str, how: str, restarted: bool) -> None:
    others_live_with_damage([kind], how, restarted=restarted)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("restarted", [False, True], ids=["known", "restarted"])
def test_damaged_values_of_all_kinds_stop_no_other_vm(how: str, restarted: bool) -> None:
    others_live_with_damage(KEYS, how, restarted=restarted)


def others_live_with_damage(kinds: Iterable[str], how: str, *, restarted: bool) -> None:
    server = MemoryServer()

    def strike() -> None:
        for key in (KEYS[kind] for kind in kinds):
            damage(server, key, DAMAGES[how](key))

    async def body() -> None:
        async with fleet(server) as made:
            await prepared(made)
            if not restarted:
                strike()
                await go_on(made, 400)
                await others_are_served(made)
                return
        strike()
        await asyncio.sleep(20)  # the earlier controllers' lease ends
        async with fleet(server) as made:
            await go_on(made, 400)
            await others_are_served(made)

    run(body)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("restarted", [False, True], ids=["known", "restarted"])
@pytest.mark.parametrize("by", [{"uid": WEB}, {"name": "web"}], ids=["uid", "name"])
def test_a_vm_with_a_damaged_record_is_reported_and_deleted(
    how: str, restarted: bool, by: dict[str, str]
) -> None:
    server = MemoryServer()

    async def told_and_deleted(made: World) -> None:
        assert RECORD in await alarms(made)
        letters = await made.client.history("virtbus.dlq.>")
        assert any(RECORD.encode() in letter.body for letter in letters)
        if restarted:
            error = await refused(made.vm("get", **by))
            assert (error.code, error.reason) == (Code.UNSUPPORTED, "unreadable")
            assert f"vm delete {WEB}" in str(error)
        else:
            view = await made.vm("get", **by)
            assert [one.type for one in view.conditions] == [CONDITION]
        assert (await refused(made.vm("stop", **by))).reason == "unreadable"
        again = await refused(made.vm("create", name="web", image="tiny"))
        assert again.reason == "name_taken"
        assert WEB in str(again)
        assert (await made.vm("delete", **by)).deleting
        await go_on(made, 3)
        for gone in (RECORD, subjects.vm_secret("n1", WEB), KEYS["claim"]):
            entry = await made.client.get(gone)
            assert entry is None or entry.kind is EntryKind.PURGE
        assert await alarms(made) == "" or RECORD not in await alarms(made)
        assert (await refused(made.vm("get", uid=WEB))).code == Code.NOT_FOUND
        assert (await made.vm("create", name="web", image="tiny")).name == "web"
        assert (await refused(made.vm("create", name="x", image="tiny", uid=WEB))).code == 410
        await others_are_served(made)

    async def body() -> None:
        async with fleet(server) as made:
            await prepared(made)
            if not restarted:
                damage(server, RECORD, DAMAGES[how](RECORD))
                await go_on(made, 200)
                await told_and_deleted(made)
                return
        damage(server, RECORD, DAMAGES[how](RECORD))
        await asyncio.sleep(20)
        async with fleet(server) as made:
            await go_on(made, 200)
            await told_and_deleted(made)

    run(body)
