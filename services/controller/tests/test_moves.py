"""The write that moves a VM, against every rival, in every order (ADR 0014, I1, I5, I15)."""

from services.controller.tests.fleets import record, uid
from services.controller.tests.schedules import Gates, ScheduledBus, broken_everywhere, explore
from services.controller.tests.test_commit import (
    check_clean,
    records,
    secrets,
    standing,
    sweep,
    swept,
)

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.assignment import Assignment
from virtbus.controller.edge.commit import Commits
from virtbus.schemas import subjects
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

WISH = subjects.node_spec("n1")
FENCED = NodeSpec(node="n1", fenced=Fence(by="operator", why="off", time_ns=1))


async def with_a_vm() -> tuple[MemoryServer, StoredVm]:
    """A VM with secrets on n1."""
    server = MemoryServer()
    committed = await Commits(MemoryBus(server)).create(record(1), secrets(1))
    return server, committed.held


def the_vm(server: MemoryServer) -> VmRecord:
    (found,) = records(server)
    return found


async def settled(server: MemoryServer) -> None:
    """After two sweeps only the VM is stored, with its secrets on its node."""
    for _ in range(2):
        await swept(server)
    check_clean(server)
    there = the_vm(server)
    assert subjects.vm_secret(there.node, there.uid) in standing(server)


async def test_one_of_two_moves_wins_and_no_secret_is_left_or_lost_in_every_order() -> None:
    async def scenario(gates: Gates) -> None:
        server, held = await with_a_vm()
        moves = {
            goal: Assignment(ScheduledBus(server, goal, gates), Fleet()).move(held, goal)
            for goal in ("n2", "n3")
        }
        results = await gates.run(moves)
        winners = [goal for goal, result in results.items() if isinstance(result, StoredVm)]
        assert len(winners) == 1
        assert (the_vm(server).node, the_vm(server).epoch) == (winners[0], 2)
        await settled(server)

    assert await explore(scenario, pauses=3) > 50


async def test_a_move_and_a_sweep_lose_no_secret_in_any_order() -> None:
    async def scenario(gates: Gates) -> None:
        server, held = await with_a_vm()
        move = Assignment(ScheduledBus(server, "mover", gates), Fleet()).move(held, "n2")
        await gates.run({"mover": move, "sweeper": sweep(ScheduledBus(server, "sweeper", gates))})
        assert the_vm(server).node == "n2"
        await settled(server)

    assert await explore(scenario, pauses=3) > 10


async def test_an_interrupted_move_loses_no_secret() -> None:
    async def prepare() -> MemoryServer:
        return (await with_a_vm())[0]

    async def move(bus: MemoryBus) -> None:
        held = await Commits(bus).latest(uid(1))
        assert held is not None
        await Assignment(bus, Fleet()).move(held, "n2")

    async for server in broken_everywhere(prepare, move):
        await settled(server)


async def test_an_unfence_and_a_move_exclude_each_other_in_every_order() -> None:
    async def scenario(gates: Gates) -> None:
        server, held = await with_a_vm()
        bus = MemoryBus(server)
        fence = await bus.put(WISH, encode(FENCED))
        mover = Assignment(ScheduledBus(server, "mover", gates), Fleet())

        async def unfence() -> None:
            await ScheduledBus(server, "unfence", gates).purge(WISH, expect=fence)

        results = await gates.run(
            {"mover": mover.move(held, "n2", fence=(FENCED, fence)), "unfence": unfence()}
        )
        moved = isinstance(results["mover"], StoredVm)
        lifted = results["unfence"] is None
        assert moved != lifted
        assert the_vm(server).node == ("n2" if moved else "n1")
        assert moved or isinstance(results["mover"], ConflictError)
        await settled(server)

    assert await explore(scenario, pauses=3) > 3


async def test_the_fence_s_revision_is_two_below_that_of_a_vm_moved_under_it() -> None:
    server, held = await with_a_vm()
    bus = MemoryBus(server)
    fence = await bus.put(WISH, encode(FENCED))
    moved = await Assignment(bus, Fleet()).move(held, "n2", fence=(FENCED, fence))
    entry = await bus.get(WISH)
    assert entry is not None
    assert entry.revision == moved.revision - 2


async def test_an_unfence_and_the_end_of_a_delete_exclude_each_other_in_every_order() -> None:
    async def scenario(gates: Gates) -> None:
        server, held = await with_a_vm()
        bus = MemoryBus(server)
        fence = await bus.put(WISH, encode(FENCED))
        commits = Commits(ScheduledBus(server, "deleter", gates))

        async def unfence() -> None:
            await ScheduledBus(server, "unfence", gates).purge(WISH, expect=fence)

        results = await gates.run(
            {"deleter": commits.finish(held, fence=(FENCED, fence)), "unfence": unfence()}
        )
        ended = isinstance(results["deleter"], int)
        lifted = results["unfence"] is None
        assert ended != lifted
        assert records(server) == ([] if ended else [held.record])
        assert ended or isinstance(results["deleter"], ConflictError)

    assert await explore(scenario, pauses=3) > 3


async def test_the_fence_s_revision_is_one_below_that_of_the_end_of_a_delete() -> None:
    server, held = await with_a_vm()
    bus = MemoryBus(server)
    fence = await bus.put(WISH, encode(FENCED))
    ended = await Commits(bus).finish(held, fence=(FENCED, fence))
    entry = await bus.get(WISH)
    assert entry is not None
    assert entry.revision == ended - 1
