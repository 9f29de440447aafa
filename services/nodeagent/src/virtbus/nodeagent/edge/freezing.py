"""Keeps guests' file systems frozen until a deadline, even if the agent ends earlier (ADR 0021).

The deadline is on disk before the freeze. The agent thaws the guest after the deadline, or, if no
agent runs then, at the start of the next agent. The thaw needs libvirt, but neither the bus nor a
record.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.bus.runtime.tasks import Background, background, wait_for_event
from virtbus.nodeagent.core.freezes import FreezeChange, FreezeFiles, Frozen
from virtbus.nodeagent.core.guest_ports import GuestAgents
from virtbus.schemas.api import FREEZE_MAX_S
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

THAW_S = 10.0
"""The time limit of an attempt to thaw."""
RETRY_S = (1.0, 30.0)
NOT_FROZEN = frozenset(
    {"domain_state", "guest_agent_absent", "guest_agent_refused", "guest_frozen"}
)
"""A freeze that failed for one of these reasons has not frozen the guest."""
SIMULATED = "the guests of this node are simulated: they have no guest agent"
NOT_RUNNING = "the guest is not running here; `virtbus vm get` shows its state"


@dataclass
class _Freeze:
    """A freeze, with its deadline on the loop's clock and an event that wakes its task."""

    shown: Frozen
    until_s: float
    wake: asyncio.Event
    failed: bool = False
    """True until the guest has confirmed the freeze. After a failure, the guest may still be
    frozen, so `_until_over` thaws it.
    """

    def end_at(self, until_s: float) -> None:
        self.until_s = until_s
        self.wake.set()


class NoFreezes:
    """The `Freezes` port for simulated guests, which have no guest agent."""

    def __init__(self) -> None:
        self.heard: Callable[[str, FreezeChange, str], None] = _ignore

    def of(self, uid: str) -> Frozen | None:
        """Return None."""

    async def freeze(self, uid: str, *, for_s: float, timeout_s: float) -> None:
        raise VirtbusError(Code.UNSUPPORTED, "guest_simulated", SIMULATED)

    async def thaw(self, uid: str, why: str, *, timeout_s: float) -> None:
        raise VirtbusError(Code.UNSUPPORTED, "guest_simulated", SIMULATED)

    def ended(self, uid: str) -> None:
        """Do nothing."""


class GuestFreezes:
    """The `Freezes` port. Use it within `keeping`."""

    def __init__(self, agents: GuestAgents, files: FreezeFiles, sources: Sources = REAL) -> None:
        self._agents = agents
        self._files = files
        self._sources = sources
        self._freezes: dict[str, _Freeze] = {}
        self._locks = KeyedLock()
        self._tasks: Background
        self.heard: Callable[[str, FreezeChange, str], None] = _ignore

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Keep all deadlines within the context, including those of an earlier agent."""
        loop = asyncio.get_running_loop()
        async with background() as self._tasks:
            for uid, frozen in (await self._files.all()).items():
                left_s = (frozen.until_ns - self._sources.time_ns()) / 1e9
                # a clock that goes back must not extend a freeze
                self._begin(uid, frozen, loop.time() + min(left_s, FREEZE_MAX_S))
            yield

    def of(self, uid: str) -> Frozen | None:
        freeze = self._freezes.get(uid)
        return None if freeze is None or freeze.failed else freeze.shown

    async def freeze(self, uid: str, *, for_s: float, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        async with self._locks.of(uid):
            before, now_ns = self._freezes.get(uid), self._sources.time_ns()
            since_ns = now_ns if before is None else before.shown.since_ns
            shown = Frozen(since_ns, now_ns + round(for_s * 1e9))
            await self._files.keep(uid, shown)
            again = before is not None and not before.failed
            freeze = before or self._begin(uid, shown, loop.time() + for_s, failed=True)
            if before is None:
                await self._first(uid, freeze, timeout_s)
            else:
                await self._again(uid, before, timeout_s)
            if self._freezes.get(uid) is not freeze:  # dropped by `ended`: the guest rebooted
                freeze = self._begin(uid, shown, loop.time() + for_s)
            freeze.shown, freeze.failed = shown, False
            freeze.end_at(loop.time() + for_s)
            self.heard(uid, "extended" if again else "frozen", "asked")

    async def _first(self, uid: str, freeze: _Freeze, timeout_s: float) -> None:
        """Freeze a guest.

        After an error, `_until_over` at once thaws a guest that may be frozen.
        """
        try:
            await self._ask(uid, timeout_s)
        except VirtbusError as error:
            if error.reason in NOT_FROZEN:
                await self._forget(uid)
            raise
        else:
            freeze.failed = False
        finally:
            if freeze.failed:
                freeze.end_at(0.0)

    async def _again(self, uid: str, before: _Freeze, timeout_s: float) -> None:
        """Freeze a guest again, for a new deadline.

        The refusal of a guest that is still frozen counts as success. After any other error, the
        earlier deadline stays in force.
        """
        done = False
        try:
            await self._ask(uid, timeout_s)
            done = True
        except VirtbusError as error:
            done = error.reason == "guest_frozen"
            if not done:
                raise
        finally:
            if not done:
                await self._files.keep(uid, before.shown)

    async def _ask(self, uid: str, timeout_s: float) -> None:
        if not await self._agents.freeze(uid, timeout_s=timeout_s):
            raise VirtbusError(Code.CONFLICT, "domain_state", NOT_RUNNING)

    async def thaw(self, uid: str, why: str, *, timeout_s: float) -> None:
        async with self._locks.of(uid):
            await self._thaw(uid, why, timeout_s)

    async def _thaw(self, uid: str, why: str, timeout_s: float) -> None:
        await self._agents.thaw(uid, timeout_s=timeout_s)
        shown = self.of(uid) is not None
        await self._forget(uid)
        if shown:
            log.info("thawed: %s", why, extra={"code": "thawed", "uid": uid})
            self.heard(uid, "thawed", why)

    def ended(self, uid: str) -> None:
        freeze = self._freezes.pop(uid, None)
        if freeze is not None:
            freeze.wake.set()
            self._tasks.start(self._cleared(uid))

    async def _cleared(self, uid: str) -> None:
        async with self._locks.of(uid):
            if uid not in self._freezes:
                await self._files.forget(uid)

    async def _forget(self, uid: str) -> None:
        freeze = self._freezes.pop(uid, None)
        if freeze is not None:
            freeze.wake.set()
        await self._files.forget(uid)

    # --- deadlines -------------------------------------------------------------------------------
    def _begin(self, uid: str, shown: Frozen, until_s: float, *, failed: bool = False) -> _Freeze:
        freeze = self._freezes[uid] = _Freeze(shown, until_s, asyncio.Event(), failed)
        self._tasks.start(self._until_over(uid, freeze))
        return freeze

    async def _until_over(self, uid: str, freeze: _Freeze) -> None:
        loop = asyncio.get_running_loop()
        pauses = delays(*RETRY_S, self._sources)
        while self._freezes.get(uid) is freeze:
            left_s = freeze.until_s - loop.time()
            if left_s > 0:
                freeze.wake.clear()
                await wait_for_event(freeze.wake, left_s)
                continue
            try:
                async with self._locks.of(uid):
                    if freeze.until_s <= loop.time() and self._freezes.get(uid) is freeze:
                        await self._thaw(uid, "timeout", THAW_S)
            except VirtbusError as error:
                self._not_thawed(uid, freeze, error)
                freeze.wake.clear()
                await wait_for_event(freeze.wake, next(pauses))

    def _not_thawed(self, uid: str, freeze: _Freeze, error: VirtbusError) -> None:
        extra = {"code": "not_thawed", "uid": uid}
        log.warning("the guest is not thawed yet, will be retried: %s", error, extra=extra)
        freeze.shown = Frozen(freeze.shown.since_ns, freeze.shown.until_ns, str(error))
        if self._freezes.get(uid) is freeze and not freeze.failed:
            self.heard(uid, "not thawed", error.reason)


def _ignore(uid: str, change: FreezeChange, why: str) -> None:
    """The agent replaces this function once it listens."""
