"""Load during the faults: VMs are created, stopped, started and deleted continuously.

Every request is repeated with the same id while its outcome is unknown. Accepted requests are
recorded, so that at the end no accepted change may be missing.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.e2e.platform import Json

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import Retry, VirtbusError

END_S = 180.0
"""Limit for a request and its effect: a fault, its repair, and a boot."""


class Wanted(StrEnum):
    """The last accepted state of a VM."""

    RUNNING = "Running"
    STOPPED = "Stopped"
    GONE = "gone"


@dataclass
class Life:
    """One VM. `open`: a request is in progress, so both outcomes are right."""

    uid: str
    name: str
    wanted: Wanted = Wanted.RUNNING
    open: bool = True
    accepted: bool = False
    hurt: bool = False
    """Its emulator may have ended: by a fault on it, or by a request."""


@dataclass
class Lives:
    """All VMs that existed; `done` counts answered requests."""

    seed: int
    simulate: bool
    known: dict[str, Life] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, bus: NatsBus, at_once: int) -> None:
        """Live until `over`; each slot ends with its VM in the requested state."""
        async with asyncio.TaskGroup() as group:
            for slot in range(at_once):
                group.create_task(self._slot(bus, slot))

    async def _slot(self, bus: NatsBus, slot: int) -> None:
        rng = random.Random(f"{self.seed}/{slot}")
        number = 0
        while not self.over.is_set():
            number += 1
            life = Life(uuid7(), f"vm-{slot}-{number}")
            self.known[life.uid] = life
            await self._live(bus, life, rng)

    async def _live(self, bus: NatsBus, life: Life, rng: random.Random) -> None:
        memory = "32MiB" if self.simulate else "64MiB"
        spec = {"uid": life.uid, "name": life.name, "image": "tiny", "memory": memory}
        await self._ask(bus, life, "create", spec, Wanted.RUNNING)
        for _ in range(rng.randrange(3)):
            await self._rest(rng)
            if self.over.is_set():
                return
            await self._ask(bus, life, "stop", {"uid": life.uid, "grace_s": 0}, Wanted.STOPPED)
            await self._rest(rng)
            await self._ask(bus, life, "start", {"uid": life.uid}, Wanted.RUNNING)
        await self._rest(rng)
        if not self.over.is_set():
            await self._ask(bus, life, "delete", {"uid": life.uid, "grace_s": 0}, Wanted.GONE)

    async def _rest(self, rng: random.Random) -> None:
        try:
            async with asyncio.timeout(rng.uniform(0.0, 6.0)):
                await self.over.wait()
        except TimeoutError:
            return

    async def _ask(self, bus: NatsBus, life: Life, verb: str, data: Json, to: Wanted) -> None:
        """Send the request, and wait for its effect."""
        life.open, life.hurt = True, life.hurt or verb in {"stop", "delete"}
        life.wanted = to
        await insist(bus, verb, data)
        life.accepted = True
        self.done[verb] += 1
        await until_shown(bus, life.uid, lambda seen: as_wanted(seen, to))
        life.open = False
        if to is Wanted.RUNNING:
            life.hurt = False


GARBLED_NODE = "no_capacity"
"""Retry `no_capacity`: all VMs here fit on the node.

A corrupted heartbeat can make the node look too small until its next heartbeat.
"""


def as_wanted(seen: Json | None, wanted: Wanted) -> bool:
    """Return True if the VM is shown in the requested state."""
    if wanted is Wanted.GONE or seen is None:
        return seen is None and wanted is Wanted.GONE
    return bool(seen["state"] == wanted)


async def insist(bus: NatsBus, verb: str, data: Json, *, within_s: float = END_S) -> Any:
    """Return the answer to a request, repeated with the same id while its outcome is unknown.

    Raises:
        VirtbusError: a refusal that a repeat does not change.
        TimeoutError: none within `within_s`.
    """
    repeated = False
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await bus.request(f"virtbus.api.v1.vm.{verb}", data, timeout_s=5)
            except VirtbusError as error:
                if verb == "delete" and error.code == 404 and repeated:
                    return None  # an earlier attempt of ours was accepted
                if error.body.retry is Retry.NEVER and error.reason != GARBLED_NODE:
                    raise
            except BusError:
                pass
            repeated = True
            await asyncio.sleep(0.3)


async def view(bus: NatsBus, uid: str) -> Json | None:
    """Return the VM as the API shows it; None if it is gone."""
    try:
        found: Json = await insist(bus, "get", {"uid": uid})
    except VirtbusError as error:
        if error.code == 404:
            return None
        raise
    return found


async def until_shown(
    bus: NatsBus, uid: str, right: Callable[[Json | None], bool], *, within_s: float = END_S
) -> Json | None:
    """Return the VM once the API shows the requested state; AssertionError with its last state."""
    seen: Json | None = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                seen = await view(bus, uid)
                if right(seen):
                    return seen
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"{uid} stays {seen}") from None
