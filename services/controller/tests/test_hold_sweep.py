"""The hold of a VM without a record ends when its node has released the VM, and never earlier."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from services.controller.tests.fleets import uid
from services.controller.tests.test_vm_api import played
from services.controller.tests.test_volume_holders import DATA, at, holder, shown
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.hold_sweep import ROUND_S
from virtbus.schemas import subjects
from virtbus.schemas.node_rpc import KnownRecords
from virtbus.schemas.vm import Tombstone
from virtbus.schemas.wire import encode

HELD = volume(9, node="n1", bound=True, holder=uid(1), held_since_ns=7)
ROUNDS_S = 3 * ROUND_S


async def nothing() -> None:
    """Let nothing happen while the node is asked."""


@asynccontextmanager
async def agent(
    made: World, removed: dict[str, int], meanwhile: Callable[[], Awaitable[None]] = nothing
) -> AsyncIterator[list[str]]:
    """The agent of n1, which has released `removed`; yields the requests."""
    asked: list[str] = []

    async def records(request: Request) -> KnownRecords:
        asked.append(request.id)
        await meanwhile()
        return KnownRecords(node="n1", removed=removed)

    info = ServiceInfo("virtbus-agent", "1.0.0", "a test", {})
    endpoint = Endpoint("records", subjects.rpc("n1", "agent", "records"), records)
    async with MemoryBus(made.server, "n1").serve(info, [endpoint]):
        yield asked


@played()
async def test_a_hold_ends_after_the_node_of_a_vm_without_a_record_has_released_it(
    made: World,
) -> None:
    await made.host.put(DATA, encode(HELD))
    await asyncio.sleep(ROUNDS_S)
    view = await shown(made)
    assert (view.state, view.holder, view.held_since_ns) == ("InUse", uid(1), 7)
    assert f"VM {uid(1)} holds it and has no record" in view.message
    async with agent(made, {uid(2): 1}):
        await asyncio.sleep(ROUNDS_S)
        assert (await at(made.host)).holder == uid(1)
    async with agent(made, {uid(1): 1}) as asked:
        await asyncio.sleep(ROUNDS_S)
    view = await shown(made)
    assert (view.state, view.holder, view.held_since_ns, view.message) == ("Bound", "", 0, "")
    assert len(asked) == 1
    (event,) = await made.client.history(subjects.events(uid(9)))
    assert event.subject.endswith("volume.updated")


@played()
async def test_a_hold_without_data_ends_without_a_node(made: World) -> None:
    await made.host.put(DATA, encode(volume(9, node="n1", holder=uid(1))))
    await asyncio.sleep(ROUNDS_S)
    assert (await shown(made)).state == "Available"


@played()
async def test_no_word_of_a_node_ends_the_hold_of_a_vm_that_may_come_back(made: World) -> None:
    values = (encode(Tombstone(uid=uid(1))), b"\xc1 no msgpack")
    await made.host.put(DATA, encode(HELD))
    async with agent(made, {uid(1): 1}):
        for value in values:
            await made.host.put(subjects.vm_record("n1", uid(1)), value)
            await asyncio.sleep(ROUNDS_S)
            assert (await at(made.host)).holder == uid(1)
        await made.host.purge(subjects.vm_record("n1", uid(1)))  # the marker of a move
        await asyncio.sleep(ROUNDS_S)
    assert (await at(made.host)).holder == uid(1)


@played()
async def test_a_vm_that_comes_back_while_its_node_answers_keeps_its_hold(made: World) -> None:
    await made.host.put(DATA, encode(HELD))
    await settle()
    vm = holder(1, HELD)

    async def restored() -> None:
        await Commits(made.host).write_back(vm, await Commits(made.host).known(vm.uid))

    async with agent(made, {uid(1): 1}, restored) as asked:
        await asyncio.sleep(ROUNDS_S)
    assert asked
    there = await at(made.host)
    assert (there.holder, there.held_since_ns) == (uid(1), 7)
