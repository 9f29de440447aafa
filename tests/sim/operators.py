"""Operators: they cordon or drain a node, or confirm that a powered-off node is off (ADR 0014)."""

import asyncio
from typing import Any

from tests.sim.bus import SimBus
from tests.sim.users import PAUSE_S, TIMEOUT_S, Plan
from tests.sim.world import World, client_role

from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError

FROM_S = 15.0
DISCARD = 0.7
"""The probability that the disks of leaving VMs may be lost."""


class Operator:
    """One person: one node at a time; at the end every node is uncordoned."""

    def __init__(self, bus: SimBus, world: World, until_s: float) -> None:
        self._bus = bus
        self._world = world
        self._until_s = until_s
        self._rng = world.rng

    async def run(self) -> None:
        """Look after the nodes until the users stop making changes."""
        kinds = [kind for kind in (self._cordon, self._drain, self._fence) if self._draw(0.4)]
        await asyncio.sleep(FROM_S)
        while kinds:
            await asyncio.sleep(self._rng.uniform(0.0, 60.0))
            if self._world.loop.time() > self._until_s:
                return
            await self._rng.choice(kinds)(self._rng.choice(list(self._world.hosts)))

    def _draw(self, chance: float) -> bool:
        return self._rng.random() < chance

    async def _ask(self, verb: str, node: str, **more: Any) -> None:
        """Repeat it under its id until it is done."""
        subject, data, once = (
            subjects.api("node", verb),
            {"node": node, **more},
            self._bus.sources.uuid7(),
        )
        while True:
            try:
                await self._bus.request(subject, data, timeout_s=TIMEOUT_S, request_id=once)
            except (BusError, VirtbusError) as error:
                why = error.reason if isinstance(error, VirtbusError) else type(error).__name__
                self._world.observer.note("operator", verb, node, "again", why)
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            else:
                self._world.observer.note("operator", verb, node)
                return

    async def _cordon(self, node: str) -> None:
        await self._ask("cordon", node)
        await asyncio.sleep(self._rng.uniform(1.0, 20.0))
        await self._ask("uncordon", node)

    async def _drain(self, node: str) -> None:
        await self._ask("drain", node, discard_local_disks=self._draw(DISCARD))
        await asyncio.sleep(self._rng.uniform(1.0, 30.0))
        await self._ask("uncordon", node)

    async def _fence(self, node: str) -> None:
        """Power a node off, fence it, power it on; nobody else powers it on meanwhile."""
        if not self._world.hosts[node].up:
            return
        self._world.power_off(node, None)
        how = {"confirm": "it is switched off", "discard_local_disks": self._draw(DISCARD)}
        await self._ask("fence", node, **how)
        await asyncio.sleep(self._rng.uniform(0.0, 20.0))
        self._world.power_on(node)
        await asyncio.sleep(self._rng.uniform(0.0, 5.0))
        await self._ask("unfence", node)


def begin(world: World, plan: Plan) -> None:
    """Start the operator, on a connection that is never cut."""
    process, bus = world.process("operator", client_role(), lambda: 0)
    process.start(Operator(bus, world, plan.operates_until_s).run)
