"""Kills a controller or an agent at every await of one create and one delete (I16).

A scenario runs once to count the steps of a process (a step is the code between two awaits).
Then it runs once for each step, and the process is killed right before it. The killed process is
back after half a second.
"""

import asyncio
from dataclasses import dataclass

import pytest
from tests.sim.rest import at_rest
from tests.sim.run import running
from tests.sim.users import Plan, User
from tests.sim.world import World, client_role

BEGIN_S = 8.0
DELETE_S = 16.0
ENOUGH_S = 6.0
"""A create or delete without a crash has ended by then."""
LIMIT_S = 90.0
BACK_S, BOOT_S = 0.5, 3.0


@dataclass
class Scenario:
    """One VM of one user on one node, under one controller."""

    delete: bool

    @property
    def from_s(self) -> float:
        return DELETE_S if self.delete else BEGIN_S

    def world(self) -> World:
        world = World(0, nodes=1, controllers=1, shuffle=False)
        process, bus = world.process("user", client_role(), lambda: 0)
        user = User(bus, world.observer, Plan(give_up_s=LIMIT_S, changes_until_s=LIMIT_S), 1)
        wanted = user.new()
        wanted.strategy, wanted.secret = "Always", True

        async def live() -> None:
            await asyncio.sleep(BEGIN_S)
            assert await user.create(wanted)
            if self.delete:
                await asyncio.sleep(DELETE_S - world.loop.time())
                await user.delete(wanted)

        world.begin()
        process.start(live)
        return world


def count(scenario: Scenario, name: str) -> int:
    """Return the number of steps of the process during the scenario."""
    world = scenario.world()
    with running(world):
        world.run_until(scenario.from_s)
        process = world.services[name].process
        assert process is not None
        before = process.steps
        world.run_until(scenario.from_s + ENOUGH_S)
        assert list(at_rest(world.observer)) == []
        return process.steps - before


def crashed_at(scenario: Scenario, name: str, step: int, *, host: bool) -> list[str]:
    """Return the violations after the process, or its whole host, died right before that step."""
    world = scenario.world()
    with running(world):
        world.run_until(scenario.from_s)
        service = world.services[name]
        assert service.process is not None
        service.process.crash_at = service.process.steps + step
        service.process.on_crash = lambda: (
            world.power_off("n1", BOOT_S) if host else world.crash(service, BACK_S)
        )
        at_s = scenario.from_s + ENOUGH_S
        world.run_until(at_s)
        while (left := list(at_rest(world.observer))) and at_s < LIMIT_S:
            at_s += 4.0
            world.run_until(at_s)
        found = [*world.observer.violations, *map(str, left)]
    return [f"step {step}: {one}" for one in found]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["controller", "agent", "host"])
@pytest.mark.parametrize("delete", [False, True], ids=["create", "delete"])
def test_a_crash_at_any_await_is_recovered(victim: str, delete: bool) -> None:
    scenario = Scenario(delete)
    name = "c1" if victim == "controller" else "n1-agent"
    steps = count(scenario, name)
    assert steps > 40
    wrong = [
        one
        for step in range(1, steps + 1)
        for one in crashed_at(scenario, name, step, host=victim == "host")
    ]
    assert wrong == []
