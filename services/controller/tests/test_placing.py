"""A VM that no node can take now is accepted, waits under `_`, and is placed once one can."""

import asyncio
from typing import Any

from services.controller.tests.fleets import GIB, node, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.demand import QEMU_OVERHEAD_BYTES
from virtbus.controller.core.placement import MEMORY_RESERVE_BYTES
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.node import NodeState
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

HALF = (16 * GIB - MEMORY_RESERVE_BYTES) // 2 - QEMU_OVERHEAD_BYTES
"""Memory: two such guests fill a node of the tests."""


async def create(made: World, number: int, **more: Any) -> VmView:
    wanted = {"name": f"v{number}", "image": "tiny", "uid": uid(number)} | more
    return await made.vm("create", **wanted)


async def placed(made: World, number: int) -> str:
    """Return the VM's node, once it has one."""
    async with asyncio.timeout(30):
        while (shown := await made.vm("get", uid=uid(number))).node == "_":
            await asyncio.sleep(0.1)
    return shown.node


async def alive(made: World, *names: str) -> None:
    for name in names:
        await made.hear(node(name))
    await settle()


@played(nodes=0)
async def test_without_a_node_a_vm_waits_with_the_reason(made: World) -> None:
    shown = await create(made, 1)
    assert (shown.node, shown.state, shown.reason) == ("_", VmState.PENDING, "unplaced")
    assert "no node has joined" in shown.message
    (condition,) = shown.conditions
    assert (condition.type, condition.status, condition.message) == (
        "Placed",
        False,
        shown.message,
    )
    stored = await made.stored(uid(1))
    assert stored is not None, "accepted means durable"
    assert (await made.vm("get", name="v1")).state is VmState.PENDING
    again = await create(made, 1)
    assert (again.node, again.revision) == ("_", shown.revision)


@played(nodes=0, controllers=2)
async def test_it_is_placed_as_soon_as_a_node_joins(made: World) -> None:
    await create(made, 1)
    await create(made, 2)
    await alive(made, "n1")
    assert await placed(made, 1) == "n1"
    assert await placed(made, 2) == "n1"
    stored = await made.stored(uid(1))
    assert stored is not None
    assert (stored.node, stored.epoch, stored.created_ns > 0) == ("n1", 2, True)
    assert stored.lease > 0
    left = await made.host.get(subjects.vm_record("_", uid(1)))
    assert left is not None
    assert left.kind is EntryKind.PURGE
    facts = await made.client.history(subjects.events(uid(1)))
    told = [open_envelope(m.body).data for m in facts if ".vm." in m.subject]
    assert [(one["kind"], one["node"]) for one in told] == [
        ("vm.accepted", "_"),
        ("vm.scheduled", "n1"),
    ]


@played(nodes=1, controllers=3)
async def test_a_pending_vm_is_placed_when_another_is_deleted(made: World) -> None:
    for number in (1, 2):
        assert (await create(made, number, memory=HALF)).node == "n1"
    for number in (3, 4):
        shown = await create(made, number, memory=HALF)
        assert shown.node == "_"
        assert "n1 has" in shown.message
    await made.vm("delete", uid=uid(1), grace_s=0)
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.DELETING, released=True))
    assert await placed(made, 3) == "n1", "the older one"
    await asyncio.sleep(10)
    await alive(made, "n1")
    assert (await made.vm("get", uid=uid(4))).node == "_"


@played(nodes=1)
async def test_a_stopped_vm_frees_room_and_its_start_needs_it_again(made: World) -> None:
    for number in (1, 2):
        await create(made, number, memory=HALF)
    waiting = await create(made, 3, memory=HALF)
    assert waiting.node == "_"
    await made.vm("stop", uid=uid(1))
    assert await placed(made, 3) == "n1"
    error = await refused(made.ask("start", uid=uid(1)))
    assert (error.code, error.reason, error.body.retry) == (429, "no_room", "later")
    assert (await made.vm("get", uid=uid(1))).powered is False
    await made.vm("stop", uid=uid(2))
    assert (await made.vm("start", uid=uid(1))).powered is True


@played(nodes=1)
async def test_an_update_that_grows_needs_room_as_well(made: World) -> None:
    shown = await create(made, 1, memory=HALF)
    await create(made, 2, memory=HALF)

    def sized(memory_bytes: int) -> dict[str, Any]:
        spec = shown.spec.model_dump(mode="json")
        spec["domain"]["memory"]["guest"] = memory_bytes
        return spec

    later = await refused(
        made.ask("update", uid=uid(1), revision=shown.revision, spec=sized(HALF + 1))
    )
    assert (later.code, later.reason) == (429, "no_room")
    never = await refused(
        made.ask("update", uid=uid(1), revision=shown.revision, spec=sized(64 * GIB))
    )
    assert (never.code, never.reason, never.body.retry) == (422, "no_capacity", "never")
    assert (
        await made.vm("update", uid=uid(1), revision=shown.revision, spec=sized(HALF - 1))
    ).spec.domain.memory.guest == HALF - 1


@played(nodes=2)
async def test_a_vm_that_could_never_fit_is_refused_at_once(made: World) -> None:
    error = await refused(made.ask("create", name="big", image="tiny", memory="64GiB"))
    assert (error.code, error.reason, error.body.retry) == (422, "no_capacity", "never")
    assert [detail.path for detail in error.body.details] == ["node/n1", "node/n2"]
    assert made.server.shelf("$KV.vm.x").revision == 0


@played(nodes=1)
async def test_a_pending_vm_can_be_deleted_and_nothing_stays(made: World) -> None:
    await made.hear(node("n1", state=NodeState.DRAINING))
    await settle()
    await create(made, 1, user_data="#cloud-config\n")
    shown = await made.vm("delete", uid=uid(1))
    assert shown.state is VmState.DELETING
    await asyncio.sleep(1)
    error = await refused(made.ask("get", uid=uid(1)))
    assert error.code == 404
    for shelf in made.server.shelves.values():
        for entry in shelf.entries.values():
            kept = entry.key.startswith(
                ("$KV.node.", "$KV.lease.", "$KV.sec._signing.", "$KV.vm.n1._host")
            )
            assert kept or entry.kind is EntryKind.PURGE


@played(nodes=1)
async def test_the_secrets_of_a_pending_vm_move_to_its_node(made: World) -> None:
    await made.hear(node("n1", state=NodeState.RECOVERING))
    await settle()
    await create(made, 1, user_data="#cloud-config\nhostname: x\n")
    before = await made.host.get(subjects.vm_secret("_", uid(1)))
    assert before is not None
    await alive(made, "n1")
    assert await placed(made, 1) == "n1"
    await settle()
    after = await made.host.get(subjects.vm_secret("n1", uid(1)))
    assert after is not None
    assert after.value == before.value
    left = await made.host.get(subjects.vm_secret("_", uid(1)))
    assert left is not None
    assert left.kind is EntryKind.PURGE


@played(nodes=0, controllers=2)
async def test_a_watcher_sees_a_pending_vm_wait_and_be_placed_but_never_deleted(
    made: World,
) -> None:
    async with made.watch() as replies:
        seen: list[tuple[str, str]] = []
        await create(made, 1)
        await settle()
        await alive(made, "n1")
        async with asyncio.timeout(20):
            while not seen or seen[-1][1] == "_":
                reply = await anext(replies)
                assert reply.get("gone") is None
                if reply.get("change"):
                    shown = validate(VmView, reply["change"])
                    seen.append((shown.state, shown.node))
    assert seen[-1] == ("Scheduled", "n1")


@played(nodes=0, controllers=3)
async def test_a_holder_of_the_lease_that_dies_is_followed_by_another_that_places(
    made: World,
) -> None:
    holder = next(n for n, c in made.controllers.items() if c._duties.tenure is not None)
    await create(made, 1)
    made.buses[holder].disconnect()
    await alive(made, "n1")
    async with asyncio.timeout(60):
        while (await made.stored(uid(1))).node == "_":  # type: ignore[union-attr]  # it stands
            await asyncio.sleep(1)
            await made.hear(node("n1"))
    holders = [n for n, c in made.controllers.items() if c._duties.tenure is not None]
    assert holders
    assert holder not in holders


@played(nodes=2, controllers=3)
async def test_hundreds_of_creates_at_once_are_placed_as_room_appears_and_each_once(
    made: World,
) -> None:
    """Three controllers, room for 4 per node: the rest waits, and is placed by age."""
    await alive(made, "n1", "n2")
    numbers = range(1, 61)

    async def make(number: int) -> None:
        await create(made, number, memory=3 * GIB)

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(make(number))
    await settle()
    host = MemoryBus(made.server, "agent")
    gone: set[int] = set()
    async with asyncio.timeout(600):
        while len(gone) < len(numbers):
            records = {n: await made.stored(uid(n)) for n in numbers if n not in gone}
            here = {n: r for n, r in records.items() if r is not None and r.node != "_"}
            for n, r in here.items():
                if not r.deleting:
                    await made.vm("delete", uid=uid(n), grace_s=0)
                await made.say(status(r, VmState.DELETING, released=True))
            gone |= {n for n, r in records.items() if r is None}
            await alive(made, "n1", "n2")
            await asyncio.sleep(0.5)
    vms = [e for e in host.server.shelf("$KV.vm.x").entries.values() if e.kind is EntryKind.PUT]
    assert vms == []


# --- a node may decline ----------------------------------------------------------------------
@played(nodes=3, controllers=2)
async def test_a_vm_that_a_node_declined_goes_to_the_next_and_not_back(made: World) -> None:
    shown = await create(made, 1)
    first = shown.node
    refusers = []
    for epoch in (1, 2, 3):
        stored = await made.stored(uid(1))
        assert stored is not None
        assert stored.epoch == epoch
        refusers.append(stored.node)
        no = status(stored, VmState.DELETING, refused=True, reason="refused", message="is full")
        await made.say(no)
        await asyncio.sleep(1)
        still = await made.vm("get", uid=uid(1))
        assert (still.node, still.state) == (stored.node, VmState.PENDING), "it is letting go"
        await made.say(no.model_copy(update={"released": True}))
        await asyncio.sleep(1)
        await alive(made, "n1", "n2", "n3")
    assert sorted(refusers) == ["n1", "n2", "n3"]
    assert (await made.vm("get", uid=uid(1))).node == "_", "nobody is asked again at once"
    for _ in range(20):
        await asyncio.sleep(4)
        await alive(made, "n1", "n2", "n3")
    again = await made.vm("get", uid=uid(1))
    assert again.node in {"n1", "n2", "n3"}
    assert again.epoch > 4 - 1
    assert first == refusers[0]


@played(nodes=2)
async def test_a_refusal_of_an_older_assignment_moves_nothing(made: World) -> None:
    await create(made, 1)
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.DELETING, refused=True, released=True, epoch=0))
    await asyncio.sleep(10)
    assert await made.stored(uid(1)) == stored
