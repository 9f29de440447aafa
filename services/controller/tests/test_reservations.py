"""Strict VMs: a node's room is given away once, in any race, pause or crash."""

import asyncio
from typing import Any

from services.controller.tests.fleets import GIB, node, record, status, uid
from services.controller.tests.schedules import Gates, ScheduledBus, broken_everywhere, explore
from services.controller.tests.test_placing import HALF, alive, create, placed
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.demand import memory_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.schemas import subjects
from virtbus.schemas.node import Reserved
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import Memory, VmRecord
from virtbus.schemas.wire import decode, encode, read

STRICT: dict[str, Any] = {"spec": {"placement": {"overcommit": "strict"}}}


def sums(server: MemoryServer) -> dict[str, Reserved]:
    return {
        key.rsplit(".", 1)[1]: read(Reserved, entry.value)
        for key, entry in server.shelf("$KV.vm.x").entries.items()
        if "._reserved." in key and entry.kind is EntryKind.PUT
    }


def check(server: MemoryServer) -> None:
    """Every sum equals that of its records, and fits on the node."""
    counted: dict[str, Reserved] = {}
    for entry in server.shelf("$KV.vm.x").entries.values():
        data = decode(entry.value) if entry.kind is EntryKind.PUT else {}
        if not data.get("reserved") or data["node"] == "_":
            continue
        one = VmRecord.model_validate(data)
        there = counted.get(one.node, Reserved(node=one.node))
        counted[one.node] = Reserved(
            node=one.node,
            vms=there.vms + 1,
            vcpus=there.vcpus + one.spec.domain.cpu.vcpus,
            memory_bytes=there.memory_bytes + memory_of(one.spec),
        )
    assert sums(server) == counted
    assert all(one.vcpus <= 8 and one.memory_bytes <= 16 * GIB for one in counted.values())


def fleet() -> Fleet:
    """A controller that knows n1 but no VMs: the most stale cache possible."""
    known = Fleet()
    known.put_node(subjects.node_record("n1"), encode(node("n1")), 0.0, 0)
    return known


def half(number: int) -> VmRecord:
    """A strict VM of half a node."""
    one = record(number, f"v{number}", reserved=True)
    domain = one.spec.domain.model_copy(update={"memory": Memory(guest=HALF)})
    return one.model_copy(update={"spec": one.spec.model_copy(update={"domain": domain})})


def test_in_any_order_of_stale_creates_two_halves_fit_and_no_third() -> None:
    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        await Commits(MemoryBus(server), fleet()).create(half(1), None)
        rivals = {
            f"c{n}": Commits(ScheduledBus(server, f"c{n}", gates), fleet()).create(half(n), None)
            for n in (2, 3)
        }
        results = await gates.run(rivals)
        assert sum(isinstance(one, NodeFullError) for one in results.values()) == 1, results
        check(server)

    asyncio.run(explore(scenario, pauses=2))


def test_an_interrupted_create_or_delete_keeps_the_sum_right() -> None:
    async def prepare() -> MemoryServer:
        server = MemoryServer()
        await Commits(MemoryBus(server), fleet()).create(half(1), None)
        return server

    async def use(bus: MemoryBus) -> None:
        commits = Commits(bus, fleet())
        await commits.create(half(2), None)
        held = await commits.latest(uid(1))
        assert held is not None
        await commits.finish(held)

    async def scenario() -> None:
        broken = 0
        async for server in broken_everywhere(prepare, use):
            broken += 1
            check(server)
            commits = Commits(MemoryBus(server), fleet())
            try:
                await commits.create(half(2), None)
            except NodeFullError:
                raise AssertionError("its own place is no obstacle") from None
            check(server)
        assert broken > 10

    asyncio.run(scenario())


async def test_a_vm_that_left_is_not_counted_again_by_a_controller_that_still_knows_it() -> None:
    server, late = MemoryServer(), fleet()
    commits = Commits(MemoryBus(server), fleet())
    there = (await commits.create(half(1), None)).held
    late.apply(there)
    await commits.finish(there)
    await Commits(MemoryBus(server), late).create(half(2), None)
    check(server)


async def deleted_as_they_come_in(made: World, left: set[int]) -> None:
    """Delete each VM once it has a node, and report its release for the node."""
    while left:
        for number in sorted(left):
            one = await made.stored(uid(number))
            if one is None:
                left.discard(number)
            elif one.node != "_":
                if not one.deleting:
                    await made.vm("delete", uid=uid(number), grace_s=0)
                await made.say(status(one, VmState.DELETING, released=True))
        await alive(made, "n1", "n2")
        await asyncio.sleep(0.5)


@played(nodes=2, controllers=3)
async def test_many_strict_creates_never_overcommit_a_node(made: World) -> None:
    """8 CPUs a node: each strict VM of 2 has its own; the rest waits, and is placed by age."""
    await alive(made, "n1", "n2")
    numbers = range(1, 81)
    worst: list[None] = []

    async def make(number: int) -> None:
        await create(made, number, cpus=2, **STRICT)

    async def watch() -> None:
        while True:
            check(made.server)
            worst.append(None)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        async with asyncio.TaskGroup() as creates:
            for number in numbers:
                creates.create_task(make(number))
        await settle()
        assert {name: one.vcpus for name, one in sums(made.server).items()} == {"n1": 8, "n2": 8}
        async with asyncio.timeout(900):
            await deleted_as_they_come_in(made, set(numbers))
        watching.cancel()
    assert sums(made.server) == {}
    assert worst


@played(nodes=1)
async def test_a_strict_vm_keeps_its_place_while_it_is_stopped(made: World) -> None:
    for number in (1, 2):
        assert (await create(made, number, memory=HALF, **STRICT)).node == "n1"
    await made.vm("stop", uid=uid(1))
    assert (await create(made, 3, memory=HALF)).node == "_"
    assert (await made.vm("start", uid=uid(1))).powered is True
    check(made.server)


@played(nodes=1)
async def test_a_node_with_a_strict_vm_shares_its_cpus_with_nobody(made: World) -> None:
    assert (await create(made, 1, cpus=6, **STRICT)).node == "n1"
    shared = await create(made, 2, cpus=4)
    assert shared.node == "_"
    assert "has 2 vCPUs left, 4 asked" in shared.message
    assert (await create(made, 3, cpus=2)).node == "n1"


@played(nodes=1)
async def test_a_strict_vm_waits_while_shared_ones_use_its_cpus(made: World) -> None:
    await create(made, 1, cpus=6)
    assert (await create(made, 2, cpus=4, **STRICT)).node == "_"
    await made.vm("stop", uid=uid(1))
    assert await placed(made, 2) == "n1"
    check(made.server)
    error = await refused(made.ask("create", name="big", image="tiny", cpus=9, **STRICT))
    assert (error.code, error.reason) == (422, "no_capacity")


@played(nodes=1)
async def test_a_strict_vm_grows_only_within_its_nodes_capacity(made: World) -> None:
    shown = await create(made, 1, memory=HALF, **STRICT)
    await create(made, 2, memory=HALF, **STRICT)

    def sized(memory_bytes: int) -> dict[str, Any]:
        spec = shown.spec.model_dump(mode="json")
        spec["domain"]["memory"]["guest"] = memory_bytes
        return spec

    wanted: dict[str, Any] = {"uid": uid(1), "revision": shown.revision}
    error = await refused(made.ask("update", **wanted, spec=sized(HALF + 1)))
    assert (error.code, error.reason) == (429, "no_room")
    await made.vm("update", **wanted, spec=sized(HALF - 1))
    check(made.server)


@played(nodes=1)
async def test_a_lost_sum_is_computed_again(made: World) -> None:
    await create(made, 1, memory=HALF, **STRICT)
    del made.server.shelf("$KV.vm.x").entries[subjects.node_reserved("n1")]  # a recreated bus
    await create(made, 2, memory=HALF, **STRICT)
    check(made.server)
    assert (await create(made, 3, memory=HALF, **STRICT)).node == "_"
