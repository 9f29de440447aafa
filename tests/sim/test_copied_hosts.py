"""Cloned hosts, restored disks and copied credentials, as stories: never two runners (I1)."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.sim.machine import Disk, Host, copy_of
from tests.sim.observer import Wanted
from tests.sim.rest import at_rest
from tests.sim.run import running
from tests.sim.users import Plan, User
from tests.sim.world import World, client_role

from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError

LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(120)
Story = Callable[[World, User, Wanted, Disk], Awaitable[None]]
Copied = Callable[[World, Disk], Disk]

DISKS: dict[str, Copied] = {
    "cloned": lambda world, _old: copy_of(world.hosts["n1"].disk),
    "restored": lambda _world, old: old,
    "credentials": lambda _world, _old: Disk(),
}


def told(story: Story) -> list[str]:
    """Return the violations after the story of one VM on one node, once all has settled."""
    world = World(0, nodes=1, controllers=2, shuffle=False)
    process, bus = world.process("user", client_role(), lambda: 0)
    user = User(bus, world.observer, Plan(give_up_s=LIMIT_S, changes_until_s=LIMIT_S), 1)
    first, second = user.new(), user.new()
    for wanted in (first, second):
        wanted.strategy, wanted.secret = "Always", False
    second.name = "second"

    async def live() -> None:
        await asyncio.sleep(5.0)
        assert await user.create(first)
        await asyncio.sleep(5.0)
        old = copy_of(world.hosts["n1"].disk)
        # one more instance that the old disk does not know
        world.crash(world.services["n1-agent"], 0.5)
        await asyncio.sleep(5.0)
        assert await user.create(second)
        await asyncio.sleep(5.0)
        await story(world, user, first, old)
        done.append(True)

    done: list[bool] = []
    with running(world):
        world.begin()
        process.start(live)
        world.run_until(LIMIT_S)
        assert done, world.observer.schedule()
        return [*world.observer.violations, *map(str, at_rest(world.observer))]


def guests(host: Host) -> list[str]:
    return [uid for uid, domain in host.domains.items() if domain.active]


def cut(world: World, host: str) -> None:
    """The host's network fails; its guests continue."""
    for service in world.of_host(host):
        assert service.link is not None
        service.link.cut()


def join(world: World, host: str) -> None:
    for service in world.of_host(host):
        assert service.link is not None
        service.link.join()


def killed(world: World) -> None:
    for service in world.of_host("n1"):
        world.crash(service, None)


def started(world: World) -> None:
    for service in world.of_host("n1"):
        world.start(service)


ENDS: dict[str, Callable[[World], None]] = {
    "runs": lambda world: None,
    "agent killed": lambda world: world.crash(world.services["n1-agent"], None),
    "services killed": killed,
    "cut off": lambda world: cut(world, "n1"),
    "off": lambda world: world.power_off("n1", None),
}
BACK: dict[str, Callable[[World], None]] = {
    "runs": lambda world: None,
    "agent killed": started,
    "services killed": started,
    "cut off": lambda world: join(world, "n1"),
    "off": lambda world: world.power_on("n1"),
}


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("end", ENDS)
def test_a_second_host_starts_nothing_in_any_state_of_the_first(disk: str, end: str) -> None:
    async def story(world: World, user: User, wanted: Wanted, old: Disk) -> None:
        del user, wanted
        ENDS[end](world)
        copy = world.copy("n1", DISKS[disk](world, old))
        for _ in range(12):
            await asyncio.sleep(5.0)
            assert guests(copy) == []
        BACK[end](world)
        await asyncio.sleep(45.0)
        assert guests(copy) == []
        assert len(guests(world.hosts["n1"])) == 2
        world.scrap(copy)

    assert told(story) == []


@pytest.mark.parametrize("disk", DISKS)
def test_a_second_host_that_is_there_first_after_a_reboot_starts_nothing(disk: str) -> None:
    async def story(world: World, user: User, wanted: Wanted, old: Disk) -> None:
        del user, wanted
        world.power_off("n1", None)
        copy = world.copy("n1", DISKS[disk](world, old))
        await asyncio.sleep(40.0)
        assert guests(copy) == []
        world.scrap(copy)
        world.power_on("n1")
        await asyncio.sleep(30.0)
        assert len(guests(world.hosts["n1"])) == 2

    assert told(story) == []


def test_a_killed_agent_is_replaced_at_once() -> None:
    async def story(world: World, user: User, wanted: Wanted, old: Disk) -> None:
        del old
        agent = world.services["n1-agent"]
        world.crash(agent, 0.0)
        began_s = world.loop.time()
        await user.stop(wanted)
        while wanted.uid in guests(world.hosts["n1"]):
            await asyncio.sleep(0.1)
        assert world.loop.time() - began_s < 8.0
        await user.start(wanted)

    assert told(story) == []


def test_a_person_gives_the_node_to_the_copy_and_the_first_host_starts_nothing_more() -> None:
    world = World(0, nodes=1, controllers=2, shuffle=False)
    process, bus = world.process("user", client_role(), lambda: 0)
    user = User(bus, world.observer, Plan(give_up_s=LIMIT_S, changes_until_s=LIMIT_S), 1)
    wanted = user.new()
    wanted.strategy, wanted.secret = "Always", False
    refused: list[str] = []

    async def live() -> None:
        await asyncio.sleep(5.0)
        assert await user.create(wanted)
        await asyncio.sleep(10.0)
        copy = world.copy("n1", Disk())
        await asyncio.sleep(8.0)
        subject, say = subjects.api("node", "takeover"), {"node": "n1", "confirm": "it is off"}
        try:
            await bus.request(subject, say, timeout_s=10)
        except VirtbusError as error:
            refused.append(error.reason)
        world.power_off("n1", None)
        await asyncio.sleep(40.0)
        assert guests(copy) == []
        await bus.request(subject, say, timeout_s=10)
        await asyncio.sleep(20.0)
        assert guests(copy) == [wanted.uid]
        world.power_on("n1")
        await asyncio.sleep(40.0)
        assert guests(world.hosts["n1"]) == []
        assert guests(copy) == [wanted.uid]
        refused.append("done")

    with running(world):
        world.begin()
        process.start(live)
        world.run_until(LIMIT_S)
        assert world.observer.violations == []
    assert refused == ["node_answers", "done"]
