"""Runs the phases and measures them: creates, churn with a killed controller, deletes."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.load.deadline import in_time
from tests.load.meters import percentiles
from tests.load.population import Vm, closed_loop
from tests.load.world import World

from virtbus.bus.runtime.tasks import background

SETTLE_S = 1.0
CHURN_IN_FLIGHT, CHURN_PAUSE_S = 8, 0.2

Figures = dict[str, Any]
Say = Callable[[str], None]


async def creates(world: World, count: int, say: Say) -> Figures:
    """Run a closed loop of `count` creates; then wait until the last one runs."""
    population, shape = world.population, world.shape
    there = set(population.vms)
    before, statuses = world.read(), await world.stored("KV_st")
    facts = await world.stored("EVT")
    begun = time.monotonic()
    async with in_time(world, "creates"), background() as tasks:
        tasks.start(_tell(world, say))
        await closed_loop((population.create for _ in range(count)), shape.in_flight)
        accepted = time.monotonic()
        vms = [vm for uid, vm in population.vms.items() if uid not in there]
        await population.settled(vms)
        converged = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    after = world.read()
    return {
        "vms": count,
        "in_flight": shape.in_flight,
        "accepted_per_s": round(count / (accepted - begun), 1),
        "running_per_s": round(count / (converged - begun), 1),
        "convergence_s": round(converged - accepted, 2),
        "accepted_ms": percentiles([vm.accepted_s - vm.asked_s for vm in vms]),
        "running_ms": percentiles([vm.running_s - vm.asked_s for vm in vms]),
        "watches_lost": population.lost[:3],
        "status_puts_per_vm": round((await world.stored("KV_st") - statuses) / count, 2),
        "facts_per_vm": round((await world.stored("EVT") - facts) / count, 2),
        **after.since(before, count),
        "pss_mib": {name: round(kib / 1024, 1) for name, kib in after.pss_kib.items()},
        "pss_kib_per_vm": {
            name: round((kib - before.pss_kib[name]) / count, 2)
            for name, kib in after.pss_kib.items()
        },
    }


async def _tell(world: World, say: Say) -> None:
    while True:
        await asyncio.sleep(2)
        _, accepted, running, gone = world.population.samples[-1]
        say(f"{accepted} accepted, {running} running, {gone} gone")


async def churn(world: World, say: Say) -> Figures:
    """Keep a steady state with some deletes and creates; restart a killed controller half way."""
    population, shape = world.population, world.shape
    before, begun = world.read(), time.monotonic()
    victims = iter([vm for vm in population.vms.values() if not vm.delete_asked_s])
    made: list[Vm] = []
    ended: list[Vm] = []

    async def keep_replacing() -> None:
        for victim in victims:
            await population.delete(victim)
            ended.append(victim)
            made.append(await population.create())
            await asyncio.sleep(CHURN_PAUSE_S)
            if time.monotonic() - begun > shape.churn_s:
                return

    async with in_time(world, "churn"):
        async with asyncio.TaskGroup() as group:
            for _ in range(min(CHURN_IN_FLIGHT, shape.vms // 4)):
                group.create_task(keep_replacing())
            await asyncio.sleep(shape.churn_s / 2)
            say("killing a controller")
            synced_s = await world.controllers[0].killed_and_ready()
            say(f"its successor knows all after {synced_s:.2f} s")
        await population.settled([*made, *ended])
        converged = time.monotonic()
    after = world.read()
    return {
        "seconds": round(converged - begun, 1),
        "replaced": len(made),
        "retries": sum(vm.retries for vm in [*made, *ended]),
        "controller_synced_s": round(synced_s, 2),
        "running_ms": percentiles([vm.running_s - vm.asked_s for vm in made]),
        "gone_ms": percentiles([vm.gone_s - vm.delete_asked_s for vm in ended]),
        "cores": {
            name: round((spent - before.cpu_s[name]) / (after.at_s - before.at_s), 3)
            for name, spent in after.cpu_s.items()
            if not name.startswith("controller")  # another process by now
        },
        "pss_mib": {name: round(kib / 1024, 1) for name, kib in after.pss_kib.items()},
    }


async def idle(world: World, seconds: float) -> Figures:
    """Measure the cost without requests."""
    before = world.read()
    await asyncio.sleep(seconds)
    after = world.read()
    took = after.at_s - before.at_s
    return {
        "cores": {n: round((v - before.cpu_s[n]) / took, 3) for n, v in after.cpu_s.items()},
        "messages_per_s": round((after.bus["in_msgs"] - before.bus["in_msgs"]) / took, 1),
        "pss_mib": {name: round(kib / 1024, 1) for name, kib in after.pss_kib.items()},
    }


async def deletes(world: World, say: Say) -> Figures:
    """Delete all at once through the same loop; then wait until the bus has no VM."""
    population, shape = world.population, world.shape
    left = [vm for vm in population.vms.values() if not vm.delete_asked_s]
    before, begun = world.read(), time.monotonic()
    async with in_time(world, "deletes"), background() as tasks:
        tasks.start(_tell(world, say))
        await closed_loop((partial(population.delete, vm) for vm in left), shape.in_flight)
        accepted = time.monotonic()
        await population.settled(left)
        converged = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    after = world.read()
    return {
        "vms": len(left),
        "accepted_per_s": round(len(left) / (accepted - begun), 1),
        "gone_per_s": round(len(left) / (converged - begun), 1),
        "accepted_ms": percentiles([vm.delete_accepted_s - vm.delete_asked_s for vm in left]),
        "gone_ms": percentiles([vm.gone_s - vm.delete_asked_s for vm in left]),
        **after.since(before, len(left)),
        "pss_mib": {name: round(kib / 1024, 1) for name, kib in after.pss_kib.items()},
    }
