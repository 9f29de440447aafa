"""Runs one seed, from start to verdict."""

import gc
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.sim import backup_users, operators, users
from tests.sim.bus import SimBus
from tests.sim.faults import HEAL_S, Nemesis
from tests.sim.rest import at_rest
from tests.sim.users import Plan
from tests.sim.world import World

END_S = 300.0
REST_FROM_S = HEAL_S + 60.0
LOOK_EVERY_S = 5.0
VOLUMES = 5
NETWORKS = 3
GROUPS = 4
BACKUPS = 2
SCHEDULES = 2
PACE = 10
OF_BACKUPS = Plan(vms=7, volumes=2, backups=5, schedules=4, deletes=0.2, creates_until_s=25.0)
"""Few VMs that stay long, and much that is done with their backups."""


@dataclass
class Verdict:
    """The result of a seed. `cpu_s` is this process's CPU time."""

    seed: int
    violations: list[str]
    trace_hash: str
    steps: int
    faults: tuple[str, ...] = ()
    cpu_s: float = 0.0
    schedule: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.violations


class _Loud(logging.Handler):
    """Collects the product's logs with a traceback, which are unexpected errors."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not self._world.loop.over:
            self._world.observer.wrong(
                "I16", f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}"
            )


@contextmanager
def running(world: World) -> Iterator[World]:
    """The world's frame, without garbage collection (which runs finalizers at any time)."""
    loud = _Loud(world)
    root = logging.getLogger("virtbus")
    before = root.level, root.propagate
    root.setLevel(logging.ERROR)
    root.propagate = False
    root.addHandler(loud)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield world
    finally:
        with warnings.catch_warnings(action="ignore"):  # of coroutines that never began
            world.close()
        root.removeHandler(loud)
        root.setLevel(before[0])
        root.propagate = before[1]
        if collecting:
            gc.enable()


def run(
    seed: int,
    *,
    only: frozenset[str] | None = None,
    plan: Plan | None = None,
    keep_all: bool = False,
    controller_bus: type[SimBus] = SimBus,
) -> Verdict:
    """Simulate five minutes of three nodes, two controllers, and the objects of a `Plan`."""
    began_s = time.process_time()
    plan = plan or Plan(
        volumes=VOLUMES, networks=NETWORKS, groups=GROUPS, backups=BACKUPS, schedules=SCHEDULES
    )
    world = World(seed, controller_bus=controller_bus, pace=PACE if plan.schedules else 1)
    world.observer.keep_all = keep_all
    nemesis = Nemesis(world, only)
    with running(world):
        world.begin()
        nemesis.begin()
        users.begin(world, plan)
        backup_users.begin(world, plan)
        operators.begin(world, plan)
        at_s = REST_FROM_S
        world.run_until(at_s)
        while (left := list(at_rest(world.observer))) and at_s < END_S:
            at_s += LOOK_EVERY_S
            world.run_until(at_s)
        for invariant, what in left:
            world.observer.wrong(invariant, what)
        schedule = world.observer.schedule()
        lines = world.observer.all
    return Verdict(
        seed=seed,
        violations=world.observer.violations,
        trace_hash=world.observer.trace_hash,
        steps=world.observer.count,
        faults=tuple(nemesis.enabled),
        cpu_s=time.process_time() - began_s,
        schedule=schedule,
        lines=lines,
    )
