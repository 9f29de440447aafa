"""Volumes that are made, moved between hosts, attached, detached and deleted during the faults."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from tests.chaos.lives import END_S, Lives, Wanted, insist
from tests.chaos.two_hosts import TwoHosts
from tests.e2e.platform import Json
from tests.hosts.fleet import STATE

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import Code, VirtbusError

VOLUMES = 2
VERBS = ("move", "move", "attach", "attach", "detach", "delete")


@dataclass
class Volumes:
    """The volumes of a run. `done` counts answered requests, and refusals by their reasons."""

    lives: Lives
    done: Counter[str] = field(default_factory=Counter)

    async def run(self, bus: NatsBus) -> None:
        """Change them until the end of the lives."""
        async with asyncio.TaskGroup() as group:
            for number in range(VOLUMES if self.lives.nodes else 0):
                group.create_task(self._keep(bus, f"volume-{number}"))

    async def _keep(self, bus: NatsBus, name: str) -> None:
        rng = random.Random(f"{self.lives.seed}/{name}")
        over, nodes = self.lives.over, self.lives.nodes
        while not over.is_set():
            spec = {"uid": uuid7(), "spec": {"size": "16MiB"}, "node": rng.choice(nodes)}
            await self._try(bus, "create", {"name": name, **spec})
            for _ in range(rng.randrange(1, 6)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0.0, 8.0)):
                        await over.wait()
                if over.is_set():
                    return
                verb, draw, to = rng.choice(VERBS), rng.random(), rng.choice(nodes)
                more = {"node": to} if verb == "move" else {}
                if verb == "attach":
                    more = {"vm": self._vm(draw)}
                await self._try(bus, verb, {"name": name, **more})

    def _vm(self, draw: float) -> str:
        """Return the name of a VM that should exist."""
        lives = [one for one in self.lives.known.values() if one.wanted is not Wanted.GONE]
        return lives[int(draw * len(lives))].name if lives else "none"

    async def _try(self, bus: NatsBus, verb: str, data: Json) -> bool:
        """Return False after a refusal that another request, or a VM's state, explains."""
        try:
            await insist(bus, verb, data, resource="volume")
        except VirtbusError as error:
            if error.code not in {Code.NOT_FOUND, Code.CONFLICT, Code.UNSUPPORTED}:
                raise
            self.done[f"volume {verb}: {error.reason}"] += 1
            return False
        self.done[f"volume {verb}"] += 1
        return True

    async def misplaced(self, ground: TwoHosts, bus: NatsBus) -> list[str]:
        """Return the volumes whose moves do not end, or whose data is not on their host only."""
        wrong = []
        for one in await _all(bus, "volume"):
            places = [
                host.name
                for host in ground.hosts.values()
                for _ in host.box.path(STATE / "disks/volumes").glob(f"*.{one['uid']}")
            ]
            if one.get("moving_to") or (places or [one["node"]]) != [one["node"]]:
                wrong.append(f"{one['name']} of {one['node']} is on {places}: {one['message']}")
        return wrong

    async def end(self, bus: NatsBus) -> None:
        """Delete all volumes, and the records of operations, once no VM is left."""
        async with asyncio.timeout(END_S):
            while left := await _all(bus, "volume"):
                for one in left:
                    await self._try(bus, "delete", {"name": one["name"]})
                await asyncio.sleep(0.5)
            while left := await _all(bus, "operation"):
                for one in left:
                    with suppress(VirtbusError):  # it has not ended yet
                        await insist(bus, "delete", {"id": one["id"]}, resource="operation")
                await asyncio.sleep(0.5)


async def _all(bus: NatsBus, resource: str) -> list[Json]:
    found = await insist(bus, "list", {}, resource=resource)
    return list(found.get("items", ()))
