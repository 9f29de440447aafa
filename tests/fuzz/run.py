"""One run: a quiet phase, an attack, the clean-up, and the verdict."""

import asyncio
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests import census
from tests.e2e.platform import NODE
from tests.fuzz.attackers import Attackers
from tests.fuzz.ground import EVIL, Ground, attacked
from tests.fuzz.guests import Guests
from tests.fuzz.images import ImageServer
from tests.fuzz.manifests import Manifests
from tests.fuzz.schedule import Schedule
from tests.fuzz.stalled import stalled
from tests.fuzz.targets import targets
from tests.fuzz.watching import Tenants, Watching

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import HeldResources, HeldSnapshot, HeldVolume
from virtbus.schemas.wire import validate

WARM_S = 3.0
QUIET_SHARE, QUIET_LEAST_S, QUIET_MOST_S = 0.25, 14.0, 90.0
GONE_S = 60.0
PULLS_S = 600.0
"""An accepted pull continues after its client left. 64 may wait for two slots, 12 s each."""


class Run:
    """`say` writes a line with the time since the start; `broken` is the verdict."""

    def __init__(
        self,
        seed: int,
        seconds: float,
        *,
        journal: Path,
        first: int = 0,
        keep_on: bool = False,
    ) -> None:
        self.seed, self.seconds, self.first = seed, seconds, first
        self.broken: list[str] = []
        self.held: list[str] = []
        self._journal = journal
        self._keep_on = keep_on
        self._begun_s = time.monotonic()

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._begun_s:7.1f} s  {text}\n")
        sys.stdout.flush()

    def run(self) -> list[str]:
        """Violations found; empty if there are none."""
        self._journal.parent.mkdir(exist_ok=True)
        self.say(f"seed {self.seed}, {self.seconds / 60:g} min; journal: {self._journal}")
        try:
            with attacked() as ground:
                try:
                    self._on(ground)
                finally:
                    self._keep(ground)
        except Exception:  # noqa: BLE001  any error that ends a run is reported as a violation
            self.broken.append(traceback.format_exc())
        for line in self.held:
            self.say(f"held: {line}")
        return self.broken

    def _keep(self, ground: Ground) -> None:
        with suppress(OSError):
            shutil.copyfile(ground.log, self._journal.with_suffix(".log"))
            shutil.copyfile(ground.seen, self._journal.with_suffix(".neighbours"))

    def _on(self, ground: Ground) -> None:
        ground.quiet = ground.census()
        tenants = Tenants(ground)
        os.nice(5)
        try:
            asyncio.run(self._attack(ground, tenants))
        finally:
            tenants.end()
            os.nice(0)
        self._census(ground)

    async def _attack(self, ground: Ground, tenants: Tenants) -> None:
        every = targets()
        schedule = Schedule(self.seed, every)
        attackers = Attackers(ground, schedule, self._journal)
        last = attackers.last
        watching = Watching(ground, attackers.stop, lambda: last, self._keep_on, self.broken)
        guests = Guests(ground, schedule.pool, attackers.coverage)
        images = ImageServer(self.seed)
        quiet_s = min(max(QUIET_SHARE * self.seconds, QUIET_LEAST_S), QUIET_MOST_S)
        users = {target.user for target in every}
        async with images.serving(), attackers.connected(users), asyncio.TaskGroup() as group:
            await asyncio.sleep(WARM_S)
            begun_s = time.time()
            self.say(f"{quiet_s:g} s without attackers")
            await asyncio.sleep(quiet_s)
            watching.begin()
            attacked_s = time.time()
            self.say(f"{len(every)} subjects of {len(users)} credentials")
            beside = [
                group.create_task(watching.watch()),
                group.create_task(guests.run()),
                group.create_task(Manifests(self.seed, attackers.coverage).run()),
                group.create_task(stalled(ground, schedule.pool, attackers.coverage)),
            ]
            await attackers.attack(self.seconds - quiet_s - WARM_S, self.say, self.first)
            over_s = time.time()
            for task in beside:
                task.cancel()
            await attackers.ask_silent(every)
            await attackers.heard_out()
            self._cover(attackers, images, ground)
            ground.uids |= schedule.pool.all_uids
            left = await self._tidy(ground)
            broken, held = await asyncio.to_thread(tenants.judge, begun_s, attacked_s, over_s)
            await watching.judge()
            self.broken += [*broken, *guests.broken, *left]
            self.held += [*watching.held, *held]
            peaks = ", ".join(f"{name} {size >> 20}" for name, size in watching.peaks.items())
            self.say(f"most memory, MiB: {peaks}")

    def _cover(self, attackers: Attackers, images: ImageServer, ground: Ground) -> None:
        """Print the counts of sent and received messages; a complete run may have no zero."""
        coverage = attackers.coverage
        keys = sorted({*coverage.sent, *((one.user, one.id) for one in targets())})
        handlers: dict[str, Counter[str]] = {}
        for of in keys:
            heard = coverage.heard.get(of, Counter())
            told = " ".join(f"{code}:{count}" for code, count in heard.most_common(6))
            self.say(f"  {of[0]:12} {of[1]:58} sent {coverage.sent[of]:5}  {told}")
            handlers.setdefault(of[1], Counter()).update(heard)
        plugins = Counter(ground.plugin_log().split())
        self.say(f"  images asked {images.asked}; CNI plugin run {plugins.total()} times")
        if attackers.denied:
            self.say(f"  {attackers.denied} messages refused by the server's permissions")
        if attackers.stop.is_set():
            return
        asked = {one.id for one in targets() if one.asked}
        none = [f"{of[0]} never sent {of[1]}" for of in keys if not coverage.sent[of]]
        none += [f"nothing was heard of {one}" for one in sorted(asked) if not handlers[one]]
        none += ["no image was asked for"] * (not images.asked)
        none += ["the CNI plugin never ran"] * (not plugins)
        self.broken += [f"coverage: {line}" for line in none]
        if not none:
            self.held.append(f"coverage: {len(keys)} subjects by credential, none zero")

    async def _tidy(self, ground: Ground) -> list[str]:
        """Delete the attackers' objects on the honest node; return those that cannot be deleted."""
        limit_s = time.monotonic() + GONE_S
        left: list[str] = ["?"]
        async with ground.bus() as bus, ground.bus("admin") as admin:
            while left and time.monotonic() < limit_s:
                left = [line for uid in sorted(ground.uids) if (line := await _deleted(bus, uid))]
                await asyncio.sleep(0.5)
            for uid in sorted(ground.uids):
                for service in ("imaged", "netd"):
                    subject = f"virtbus.node.{NODE}.rpc.{service}.release"
                    with suppress(VirtbusError, BusError):
                        await admin.request(subject, {"uid": uid}, timeout_s=5)
            with suppress(VirtbusError, BusError):  # the census shows what is left
                await _release_data(admin)
        return [f"deleted: {line}" for line in left]

    def _census(self, ground: Ground) -> None:
        begun_s = time.monotonic()
        changed = census.diff(ground.quiet, ground.census())
        while changed and time.monotonic() < begun_s + _limit_s(changed):
            time.sleep(1)
            changed = census.diff(ground.quiet, ground.census())
        if changed:
            self.broken.append("\n  ".join(["census:", *changed[:40]]))
        else:
            self.held.append("census: as before the attack")


def _limit_s(changed: list[str]) -> float:
    return PULLS_S if all("/images/part/" in line for line in changed) else GONE_S


async def _release_data(admin: NatsBus) -> None:
    """Release volumes and snapshots that the node's own credentials made, without records."""
    for kind in ("volume", "snapshot"):
        ask = {f"{kind}s_after": ""}
        page = validate(HeldResources, await admin.request(_imaged("inspect"), ask, timeout_s=5))
        held: Sequence[HeldVolume | HeldSnapshot] = getattr(page, f"{kind}s")
        for ref in [one.ref for one in held if one.ref is not None]:
            body = {"ref": ref.model_dump(mode="json")}
            await admin.request(_imaged(f"{kind}-release"), body, timeout_s=5)


def _imaged(verb: str) -> str:
    return f"virtbus.node.{NODE}.rpc.imaged.{verb}"


async def _deleted(bus: NatsBus, uid: str) -> str:
    """Delete a VM; return nothing once it is gone, or is on the node of the attackers."""
    try:
        view = await bus.request("virtbus.api.v1.vm.get", {"uid": uid}, timeout_s=5)
        await bus.request("virtbus.api.v1.vm.delete", {"uid": uid, "grace_s": 0}, timeout_s=5)
    except VirtbusError as error:
        return "" if error.code in {404, 409} else f"{uid}: {error}"
    except BusError as error:
        return f"{uid}: {error}"
    if view.get("node") == EVIL:
        return ""
    return f"{uid} is {view.get('state')}: {view.get('message')}"
