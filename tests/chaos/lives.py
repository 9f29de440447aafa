"""Load during the faults: VMs are created, stopped, started, moved, labelled and deleted.

Every request is repeated with the same id while its outcome is unknown. Accepted requests are
recorded, so that at the end no accepted change may be missing.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.e2e.platform import Json

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError

END_S = 180.0
"""Limit for a request and its effect: a fault, its repair, and a boot."""
APPS = ("web", "db", "lb")
"""Values of the label that security groups select."""
STAYS = frozenset({"node_silent", "unplaced", "volumes_stay"})
"""Refusals of a move that a fault or an attached volume explains."""


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
    network: str = ""
    """The object that it has its address from; empty: none, so the node chooses one."""
    app: str = APPS[0]
    wanted: Wanted = Wanted.RUNNING
    open: bool = True
    accepted: bool = False
    hurt: bool = False
    """Its emulator may have ended: by a fault on it, or by a request."""
    harms: int = 0

    def harm(self) -> None:
        """Its emulator may end from now on."""
        self.hurt, self.harms = True, self.harms + 1


@dataclass
class Lives:
    """All VMs that existed; `done` counts answered requests, and refused creates and moves.

    `networks` are those that VMs draw from, and `nodes` those between which VMs move.
    """

    seed: int
    simulate: bool
    networks: Sequence[str] = ("",)
    nodes: Sequence[str] = ()
    known: dict[str, Life] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    exhausted_s: float = 0.0
    """The time of the last create that was refused because the pool had no address."""
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
            network = rng.choice(self.networks)
            life = Life(uuid7(), f"vm-{slot}-{number}", network, rng.choice(APPS))
            self.known[life.uid] = life
            if await self._create(bus, life, rng):
                await self._live(bus, life, rng)

    async def _create(self, bus: NatsBus, life: Life, rng: random.Random) -> bool:
        """Return False if the pool of its network has no address until the end."""
        data = {"uid": life.uid, "name": life.name, "image": "tiny", "labels": {"app": life.app}}
        data["memory"] = "32MiB" if self.simulate else "128MiB"  # with 64, it reboots for ever
        if life.network:
            data["network"] = life.network
        while True:
            try:
                await self._ask(bus, life, "create", data, Wanted.RUNNING)
            except VirtbusError as error:
                if error.reason != EXHAUSTED:
                    raise
                self.done[EXHAUSTED] += 1
                self.exhausted_s = time.monotonic()
                await self._rest(rng)
            else:
                return True
            if self.over.is_set():
                await self._never(bus, life)
                return False

    async def _never(self, bus: NatsBus, life: Life) -> None:
        """Delete a VM whose create was refused: nothing of it may exist."""
        life.wanted = Wanted.GONE
        with suppress(VirtbusError):  # there is none
            await insist(bus, "delete", {"uid": life.uid, "grace_s": 0})
        await until_shown(bus, life.uid, lambda seen: seen is None)
        life.open = False

    async def _live(self, bus: NatsBus, life: Life, rng: random.Random) -> None:
        steps = [self._off_and_on, self._off_and_on, self._label]
        steps += [self._move, self._move] if self.nodes else []
        for _ in range(rng.randrange(4)):
            await self._rest(rng)
            step = rng.choice(steps)
            if self.over.is_set():
                return
            await step(bus, life, rng)
        await self._rest(rng)
        if not self.over.is_set():
            await self._ask(bus, life, "delete", {"uid": life.uid, "grace_s": 0}, Wanted.GONE)

    async def _off_and_on(self, bus: NatsBus, life: Life, rng: random.Random) -> None:
        await self._ask(bus, life, "stop", {"uid": life.uid, "grace_s": 0}, Wanted.STOPPED)
        await self._rest(rng)
        await self._ask(bus, life, "start", {"uid": life.uid}, Wanted.RUNNING)

    async def _label(self, bus: NatsBus, life: Life, rng: random.Random) -> None:
        """Put it into other groups; read again after a lost race."""
        app, life.open = rng.choice(APPS), True
        while (seen := await view(bus, life.uid)) and seen["labels"] != {"app": app}:
            data = {"uid": life.uid, "revision": seen["revision"], "labels": {"app": app}}
            try:
                await insist(bus, "update", data)
            except VirtbusError as error:
                if error.code != Code.CONFLICT:
                    raise
                await asyncio.sleep(0.3)
        self.done["label"] += 1
        life.app, life.open = app, False

    async def _move(self, bus: NatsBus, life: Life, rng: random.Random) -> None:
        """Move it to another node, and lose its disks; a fault may keep it, or send it back."""
        here = (await view(bus, life.uid) or {}).get("node")
        to = rng.choice([node for node in self.nodes if node != here])
        life.open = True
        life.harm()
        data = {"uid": life.uid, "to": to, "discard_local_disks": True}
        try:
            asked = await insist(bus, "move", data)
        except VirtbusError as error:
            if error.reason not in STAYS:
                raise
            self.done[f"move: {error.reason}"] += 1
            life.open = False  # it stays hurt: an earlier attempt may yet be accepted
            return
        leaves = asked["node"] != to
        shown = await until_shown(
            bus,
            life.uid,
            lambda seen: as_wanted(seen, life.wanted) and _epoch(seen) >= asked["epoch"] + leaves,
        )
        self.done["move" if shown and shown["node"] == to else "move: sent back"] += 1
        life.open = life.hurt = False

    async def _rest(self, rng: random.Random) -> None:
        try:
            async with asyncio.timeout(rng.uniform(0.0, 6.0)):
                await self.over.wait()
        except TimeoutError:
            return

    async def _ask(self, bus: NatsBus, life: Life, verb: str, data: Json, to: Wanted) -> None:
        """Send the request, and wait for its effect."""
        life.open, life.wanted = True, to
        if verb in {"stop", "delete"}:
            life.harm()
        await insist(bus, verb, data)
        life.accepted = True
        self.done[verb] += 1
        await until_shown(bus, life.uid, lambda seen: as_wanted(seen, to))
        life.open = False
        if to is Wanted.RUNNING:
            life.hurt = False


EXHAUSTED = "pool_exhausted"
GARBLED_NODE = "no_capacity"
"""Retry `no_capacity`: all VMs here fit on the node.

A corrupted heartbeat can make the node look too small until its next heartbeat.
"""


def as_wanted(seen: Json | None, wanted: Wanted) -> bool:
    """Return True if the VM is shown in the requested state."""
    if wanted is Wanted.GONE or seen is None:
        return seen is None and wanted is Wanted.GONE
    return bool(seen["state"] == wanted)


def _epoch(seen: Json | None) -> int:
    return seen["epoch"] if seen else 0


async def insist(
    bus: NatsBus, verb: str, data: Json, *, resource: str = "vm", within_s: float = END_S
) -> Any:
    """Return the answer to a request, repeated with the same id while its outcome is unknown.

    Raises:
        VirtbusError: a refusal that a repeat does not change, or of an exhausted pool.
        TimeoutError: none within `within_s`.
    """
    repeated = False
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await bus.request(subjects.api(resource, verb), data, timeout_s=5)
            except VirtbusError as error:
                if verb == "delete" and error.code == Code.NOT_FOUND and repeated:
                    return None  # an earlier attempt of ours was accepted
                lasts = error.body.retry is Retry.NEVER and error.reason != GARBLED_NODE
                if lasts or error.reason == EXHAUSTED:
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
        if error.code == Code.NOT_FOUND:
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
