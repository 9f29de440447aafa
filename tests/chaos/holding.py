"""Checks the invariants (docs/reference/invariants.md) from outside during chaos."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tests.chaos.claims import Claims
from tests.chaos.lives import Life, Lives, Wanted, as_wanted, insist
from tests.chaos.networks import FEW, FEW_ADDRESSES, Networks
from tests.chaos.placed import Placed, attached, given_twice
from tests.chaos.striking import Ground
from tests.chaos.two_hosts import TwoHosts
from tests.chaos.volumes import Volumes
from tests.e2e import host
from tests.e2e.platform import Json
from tests.hosts import pace

from virtbus.bus.client.nats_bus import NatsBus

LOOK_S = 0.5
CONVERGED_S = 90.0
"""The 60 s of I8, and a boot on a busy machine without KVM."""
FREE_S = 60.0
"""Limit for a controller to learn of a released address: a bus that hangs, and a new watch."""
BOOT_S = 200.0
"""Limit for the boots of all guests at once, on a machine without other load."""
UNIQUE = "I13 one VM for each address"
LEAKS = "I5 nothing leaks"


@dataclass
class Holding:
    """`broken` has a line for each violation; `looks` counts the checks of each invariant."""

    ground: Ground
    lives: Lives
    networks: Networks
    volumes: Volumes
    claims: Claims = field(default_factory=Claims)
    broken: list[str] = field(default_factory=list)
    looks: Counter[str] = field(default_factory=Counter)
    _ran: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By uid: the emulator, and the number of harms until then."""
    _gone: set[str] = field(default_factory=set)
    _full_s: float = field(default_factory=time.monotonic)
    """The time at which the small pool last was exhausted."""

    def _must(self, invariant: str, right: bool, what: str) -> None:
        self.looks[invariant] += 1
        if not right:
            self.broken.append(f"{invariant}: {what}")

    # --- at any time ----------------------------------------------------------------------
    async def watch(self) -> None:
        """Check the hosts until cancelled."""
        while True:
            if not self.ground.simulate:
                harms = {uid: life.harms for uid, life in self.lives.known.items()}
                self._look_at(await asyncio.to_thread(host.emulators), harms)
            if isinstance(self.ground, TwoHosts):
                await self._look_at_addresses(self.ground)
            self._look_at_pool()
            await asyncio.sleep(LOOK_S)

    def _look_at(self, emulators: dict[str, list[int]], harms: dict[str, int]) -> None:
        for uid, count in harms.items():
            life, pids = self.lives.known[uid], emulators.get(uid, [])
            self._must("I1 one runner", len(pids) <= 1, f"{life.name} runs as {pids}")
            if uid in self._gone:
                self._must("I3 deleted stays deleted", not pids, f"{life.name} runs again")
            elif life.wanted is Wanted.GONE and not life.open:
                self._gone.add(uid)
            before = self._ran.pop(uid, (0, -1))
            if pids:
                self._ran[uid] = (pids[0], count)
            if before[1] == life.harms and not life.hurt and life.wanted is Wanted.RUNNING:
                right = before[0] in pids
                self._must("I4 guests run on", right, f"{life.name} ended: {before[0]}")

    async def _look_at_addresses(self, ground: TwoHosts) -> None:
        """I13: what netd has attached; a second look, because the first is no single moment."""
        wrong = given_twice(await asyncio.to_thread(attached, ground))
        if wrong:
            there = given_twice(await asyncio.to_thread(attached, ground))
            wrong = [one for one in wrong if one in there]
        self._must(UNIQUE, not wrong, "; ".join(wrong))

    def _look_at_pool(self) -> None:
        """I5: a pool refuses nobody for long while it has a free address."""
        if self.claims.count(self.networks.uids[FEW]) >= FEW_ADDRESSES:
            self._full_s = time.monotonic()
        since_s = self.lives.exhausted_s - self._full_s
        self._must(
            "I5 free addresses are given", since_s < FREE_S, f"refused after {since_s:.0f} s"
        )

    # --- at the end -----------------------------------------------------------------------
    async def at_the_end(self, bus: NatsBus, admin: NatsBus) -> None:
        """After the last fault: all is as accepted, and after the deletes nothing is left."""
        await asyncio.to_thread(self.ground.wait_whole)
        await self._soon("I8 converged", lambda: self._states(bus))
        await self._accepted(bus)
        await self._soon("I5 no claim without a VM", self._orphans)
        if isinstance(self.ground, TwoHosts):
            await self._on_hosts(self.ground, bus)
        for life in self.lives.known.values():
            if life.wanted is not Wanted.GONE:
                life.wanted, life.open = Wanted.GONE, True
                life.harm()
                await insist(bus, "delete", {"uid": life.uid, "grace_s": 0})
        await self.volumes.end(bus)
        await self.networks.end(bus, admin)
        self.looks[UNIQUE] += self.claims.looks
        self.broken += [f"{UNIQUE}: {one}" for one in self.claims.wrong]
        try:
            await asyncio.to_thread(self.ground.nothing_left)
        except AssertionError as error:
            self._must(LEAKS, right=False, what=str(error))
        else:
            self._must(LEAKS, right=True, what="")

    async def _on_hosts(self, ground: TwoHosts, bus: NatsBus) -> None:
        """Each VM is on one host, with the address that it claims, and the rules of its groups."""
        lives = [one for one in self.lives.known.values() if one.wanted is not Wanted.GONE]

        def soon(
            invariant: str,
            check: Callable[[Placed, Life], list[str]],
            within_s: float = CONVERGED_S,
        ) -> Awaitable[None]:
            async def wrong() -> list[str]:
                placed = Placed(ground, self.claims, await _shown(bus))
                found = [await asyncio.to_thread(check, placed, life) for life in lives]
                return [line for lines in found for line in lines]

            return self._soon(invariant, wrong, within_s)

        groups = self.networks.groups
        await soon("I1 one host", Placed.elsewhere)
        await self._soon("I8 volumes", lambda: self.volumes.misplaced(ground, bus))
        await soon("I8 rules of groups", lambda placed, life: placed.misruled(life, lives, groups))
        boot_s = BOOT_S * pace.slowness()
        await soon("I13 the claimed address", Placed.misaddressed, boot_s)

    async def _soon(
        self,
        invariant: str,
        check: Callable[[], Awaitable[list[str]]],
        within_s: float = CONVERGED_S,
    ) -> None:
        """Repeat a check until nothing is wrong."""
        wrong = ["?"]
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while wrong := await check():
                    await asyncio.sleep(0.5)
        self._must(invariant, not wrong, "; ".join(wrong))

    async def _states(self, bus: NatsBus) -> list[str]:
        """Return the VMs without the state of their last accepted request."""
        shown = await _shown(bus)
        return [
            f"{life.name} is {(shown.get(uid) or {}).get('state')}, not {life.wanted}"
            for uid, life in self.lives.known.items()
            if not life.open and not as_wanted(shown.get(uid), life.wanted)
        ]

    async def _orphans(self) -> list[str]:
        return self.claims.orphans()

    async def _accepted(self, bus: NatsBus) -> None:
        """I2: no accepted VM is missing, and no VM exists that nobody requested."""
        shown, lives = set(await _shown(bus)), self.lives.known
        missing = [
            life.name
            for uid, life in lives.items()
            if life.accepted and life.wanted is not Wanted.GONE and uid not in shown
        ]
        self._must("I2 nothing accepted is lost", not missing, f"missing: {missing}")
        self._must("I3 deleted stays deleted", shown <= set(lives), f"{shown - set(lives)}")


async def _shown(bus: NatsBus) -> dict[str, Json]:
    """Return all VMs as the API shows them, by uid."""
    page = await insist(bus, "list", {"limit": 500})
    return {item["uid"]: item for item in page.get("items", ())}
