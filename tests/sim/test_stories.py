"""Schedules that seeds have found, as stories: they remain when the seeds' draws change."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest
from tests.sim.observer import Wanted
from tests.sim.rest import at_rest
from tests.sim.run import running
from tests.sim.users import Plan, User
from tests.sim.world import World, client_role

LIMIT_S = 90.0
pytestmark = pytest.mark.timeout(120)
Story = Callable[[World, User, Wanted], Awaitable[None]]


def told(story: Story, seed: int = 0) -> list[str]:
    """Return the violations after the story of one VM on one node, once all has settled."""
    world = World(seed, nodes=1, controllers=2, shuffle=False)
    process, bus = world.process("user", client_role(), lambda: 0)
    user = User(bus, world.observer, Plan(give_up_s=LIMIT_S, changes_until_s=LIMIT_S), 1)
    wanted = user.new()
    wanted.strategy, wanted.secret = "Always", False

    async def live() -> None:
        await asyncio.sleep(5.0)
        assert await user.create(wanted)
        await asyncio.sleep(5.0)
        await story(world, user, wanted)

    with running(world):
        world.begin()
        process.start(live)
        world.run_until(LIMIT_S)
        return [*world.observer.violations, *map(str, at_rest(world.observer))]


def test_a_stop_and_a_start_that_arrive_together_end_in_a_running_guest() -> None:
    async def story(world: World, user: User, wanted: Wanted) -> None:
        agent = world.services["n1-agent"].process
        assert agent is not None
        agent.stall(6.0)
        await user.stop(wanted)
        await user.start(wanted)

    assert told(story) == []


def test_a_clock_an_hour_behind_does_not_stop_the_sweep() -> None:
    async def story(world: World, user: User, wanted: Wanted) -> None:
        for name in ("c1", "c2"):
            world.services[name].skew_ns = -3_600_000_000_000
        world.server.weather.lose_request = 0.5
        await user.delete(wanted)
        await asyncio.sleep(10.0)
        world.server.weather.lose_request = 0.0

    assert told(story) == []


def test_a_lost_event_of_libvirt_is_corrected() -> None:
    async def story(world: World, user: User, wanted: Wanted) -> None:
        del user
        host = world.hosts["n1"]
        host.temper.events_lost = 1.0
        host.crash_guest(wanted.uid)
        await asyncio.sleep(1.0)
        host.temper.events_lost = 0.0

    assert told(story) == []


def test_a_delete_on_a_full_disk_ends_once_there_is_room() -> None:
    async def story(world: World, user: User, wanted: Wanted) -> None:
        world.hosts["n1"].full = True
        await user.delete(wanted)
        await asyncio.sleep(20.0)
        assert world.observer.vms[wanted.uid].record is not None
        world.hosts["n1"].free()

    assert told(story) == []


@pytest.mark.parametrize("how", ["refuses", "mute"])
def test_a_change_on_a_full_bus_is_made_once_there_is_room(how: Literal["refuses", "mute"]) -> None:
    async def story(world: World, user: User, wanted: Wanted) -> None:
        world.server.full = how
        world.loop.call_later(20.0, world.server.free)
        await user.stop(wanted)
        assert world.loop.time() > 25.0
        await user.start(wanted)

    assert told(story) == []


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stop_that_arrives_again_after_a_later_start_does_nothing(seed: int) -> None:
    async def story(world: World, user: User, wanted: Wanted) -> None:
        slow, other = world.services["c1"], world.services["c2"]
        assert slow.link is not None
        assert other.link is not None
        other.link.cut()
        slow.link.stall(45.0)
        world.loop.call_later(1.0, other.link.join)
        await user.stop(wanted)
        await user.start(wanted)
        assert world.loop.time() < 45.0

    assert told(story, seed) == []
