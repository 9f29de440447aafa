"""Checks the invariants (docs/reference/invariants.md) from outside during chaos."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from tests import census
from tests.chaos.field import Field
from tests.chaos.lives import Lives, Wanted, as_wanted, insist
from tests.e2e import host

from virtbus.bus.client.nats_bus import NatsBus

LOOK_S = 0.5
CONVERGED_S = 90.0
"""The 60 s of I8, and a boot on a busy machine without KVM."""


@dataclass
class Holding:
    """`broken` has a line for each violation; `looks` counts the checks of each invariant."""

    ground: Field
    lives: Lives
    broken: list[str] = field(default_factory=list)
    looks: Counter[str] = field(default_factory=Counter)
    _ran: dict[str, int] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    def _must(self, invariant: str, right: bool, what: str) -> None:
        self.looks[invariant] += 1
        if not right:
            self.broken.append(f"{invariant}: {what}")

    async def watch(self) -> None:
        """Check the host until cancelled."""
        while True:
            if not self.ground.simulate:
                self._look_at(await asyncio.to_thread(self._emulators))
            await asyncio.sleep(LOOK_S)

    def _emulators(self) -> dict[str, list[int]]:
        return {uid: host.qemu_pids(uid) for uid in list(self.lives.known)}

    def _look_at(self, emulators: dict[str, list[int]]) -> None:
        for uid, pids in emulators.items():
            life = self.lives.known[uid]
            self._must("I1 one runner", len(pids) <= 1, f"{life.name} runs as {pids}")
            if uid in self._gone:
                self._must("I3 deleted stays deleted", not pids, f"{life.name} runs again")
            elif life.wanted is Wanted.GONE and not life.open:
                self._gone.add(uid)
            before = self._ran.pop(uid, 0)
            if pids:
                self._ran[uid] = pids[0]
            if before and not life.hurt and life.wanted is Wanted.RUNNING:
                self._must("I4 guests run on", before in pids, f"{life.name} ended: {before}")

    async def at_the_end(self, bus: NatsBus) -> None:
        """After the last fault: all is as accepted, and after the deletes nothing is left."""
        await asyncio.to_thread(self.ground.wait_whole)
        await self._converged(bus)
        await self._accepted(bus)
        for life in self.lives.known.values():
            if life.wanted is not Wanted.GONE:
                life.wanted, life.open, life.hurt = Wanted.GONE, True, True
                await insist(bus, "delete", {"uid": life.uid, "grace_s": 0})
        await asyncio.to_thread(self._nothing_left)

    async def _converged(self, bus: NatsBus) -> None:
        """I8: every VM has the state of its last accepted request."""
        wrong: list[str] = ["?"]
        try:
            async with asyncio.timeout(CONVERGED_S):
                while wrong:
                    page = await insist(bus, "list", {"limit": 500})
                    shown = {item["uid"]: item for item in page.get("items", ())}
                    wrong = [
                        f"{life.name} is {(shown.get(uid) or {}).get('state')}, not {life.wanted}"
                        for uid, life in self.lives.known.items()
                        if not life.open and not as_wanted(shown.get(uid), life.wanted)
                    ]
                    if wrong:
                        await asyncio.sleep(0.5)
        except TimeoutError:
            pass
        self._must("I8 converged", not wrong, "; ".join(wrong))

    async def _accepted(self, bus: NatsBus) -> None:
        """I2: no accepted VM is missing, and no VM exists that nobody requested."""
        page = await insist(bus, "list", {"limit": 500})
        shown = {item["uid"] for item in page.get("items", ())}
        lives = self.lives.known
        missing = [
            life.name
            for uid, life in lives.items()
            if life.accepted and life.wanted is not Wanted.GONE and uid not in shown
        ]
        self._must("I2 nothing accepted is lost", not missing, f"missing: {missing}")
        self._must("I3 deleted stays deleted", shown <= set(lives), f"{shown - set(lives)}")

    def _nothing_left(self) -> None:
        """I5: the census and the keys of the bus are the same as without VMs."""
        self.ground.uids.update(self.lives.known)
        try:
            self.ground.wait_quiet()
            self.ground.wait_no_keys()
        except AssertionError as error:
            self._must("I5 nothing leaks", right=False, what=str(error))
            return
        self._must("I5 nothing leaks", not census.diff(self.ground.quiet, self.ground.census()), "")
