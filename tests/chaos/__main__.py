"""`make chaos MINUTES=n SEED=s`: injects random faults under load on two hosts.

A seed always has the same schedule; the machine's timing differs. Exit code 0: no violation.
Exit code 1: a violation, printed with its lines and the seed to repeat. SIMULATE=1 runs one node
without QEMU.
"""

import asyncio
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tests.chaos.field import Field
from tests.chaos.holding import Holding
from tests.chaos.lives import Lives
from tests.chaos.networks import Networks
from tests.chaos.schedule import strikes
from tests.chaos.striking import Ground, Strikes, awake
from tests.chaos.two_hosts import NODES, two_hosts
from tests.chaos.volumes import Volumes
from tests.e2e import host
from tests.hosts import pace

AT_ONCE = 4
"""VMs at a time: without KVM each boots on a core of its own."""
SWEEPS = {"VIRTBUS_SWEEP_INTERVAL_S": "2", "VIRTBUS_ORPHAN_GRACE_S": "5"}


class Run:
    """One run of a seed; `say` writes a line with the time since its start."""

    def __init__(self, seed: int, minutes: float, *, simulate: bool) -> None:
        self.seed, self.seconds, self.simulate = seed, minutes * 60, simulate
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._begun:7.1f} s  {text}\n")
        sys.stdout.flush()

    async def on(self, ground: Ground) -> Holding:
        """Inject faults on a loaded platform until the time is over; then check recovery."""
        nodes = () if self.simulate else NODES
        networks = Networks(self.seed, self.simulate)
        lives = Lives(self.seed, self.simulate, networks.drawn, nodes)
        volumes = Volumes(lives)
        holding = Holding(ground, lives, networks, volumes)
        striking = Strikes(ground, lives, self.say)
        async with (
            ground.bus() as bus,
            ground.bus("admin") as admin,
            asyncio.TaskGroup() as group,
        ):
            await networks.make(admin)
            background = [holding.watch(), holding.claims.watch(admin), striking.hear()]
            watching = [group.create_task(one) for one in background]
            living = group.create_task(lives.run(bus, AT_ONCE))
            changing = [
                group.create_task(networks.run(bus, lives.over)),
                group.create_task(volumes.run(bus)),
            ]
            with awake(ground):
                await self._strike(striking, living)
            self.say("no more faults; running faults end")
            lives.over.set()
            for task in (living, *changing):
                await task
            await holding.at_the_end(bus, admin)
            for task in watching:
                task.cancel()
        done = dict(sorted((lives.done + networks.done + volumes.done).items()))
        self.say(f"{striking.count} faults; answered: {done}")
        return holding

    async def _strike(self, striking: Strikes, living: "asyncio.Task[None]") -> None:
        end = self._begun + self.seconds
        for strike in strikes(self.seed, simulate=self.simulate):
            await asyncio.sleep(strike.pause_s)
            if time.monotonic() + strike.lasts_s > end or living.done():
                return
            await striking.strike(strike)


@contextmanager
def one_node(seed: int) -> Iterator[Field]:
    """A simulated node behind a link."""
    field = Field(SWEEPS, seed=seed)
    try:
        field.start()
        field.quiet = field.census()
        yield field
        field.stop()
    finally:
        keep = os.environ.get("VIRTBUS_E2E_KEEP")
        if keep:
            os.makedirs(keep, exist_ok=True)
            shutil.copyfile(field.log, f"{keep}/chaos-{seed}.log")
        field.wipe()


def run(seed: int, minutes: float, *, simulate: bool) -> list[str]:
    """Violations found; empty if there are none."""
    host.refuse_the_machines_own_network()
    one = Run(seed, minutes, simulate=simulate)
    pace.slowness()  # before we make the machine slow ourselves
    one.say(f"seed {seed}, {minutes:g} min, {'simulated' if simulate else 'real guests'}")
    try:
        with one_node(seed) if simulate else two_hosts(SWEEPS, seed) as ground:
            one._begun = time.monotonic()
            holding = asyncio.run(one.on(ground))
    except Exception:  # noqa: BLE001  any error that ends a run is reported as a violation
        return [traceback.format_exc()]
    for invariant, looks in sorted(holding.looks.items()):
        held = not any(line.startswith(invariant) for line in holding.broken)
        one.say(f"{'held' if held else 'BROKEN'}: {invariant} ({looks} looks)")
    return holding.broken


def main() -> int:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    minutes = float(os.environ.get("MINUTES") or 3)
    simulate = os.environ.get("SIMULATE", "") not in {"", "0"}
    broken = run(seed, minutes, simulate=simulate)
    for line in broken:
        sys.stdout.write(f"VIOLATION {line}\n")
    if broken:
        sys.stdout.write(f"repeat: make chaos SEED={seed} MINUTES={minutes:g}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
