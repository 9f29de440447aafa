"""Leases: what one controller at a time does for all of them (design §3, `$KV.lease.<role>`).

The bus keeps a lease for TTL_S after each renewal; its holder stops acting MARGIN_S before that,
by its own monotonic clock counted from before the renewal was sent. So a holder that was stopped,
or cut off, finds its tenure over before a rival can have begun one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from virtbus.bus.ports import Bus, BusError, ConflictError, Entry, EntryKind
from virtbus.bus.tasks import background
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.lease import Lease
from virtbus.schemas.records import read_stored
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

TTL_S = 15.0
RENEW_S = 4.0
MARGIN_S = 3.0
"""Longer than a write that is under way may still take to reach the bus's leader."""
LOOK_S = 2.0
"""Between two looks at a lease that another holds."""
AGAIN_S = 1.0
GIVE_BACK_S = 1.0
MARKER_TTL_S = 60.0


class LeaseLostError(Exception):
    """The tenure is over: another may hold the lease by now, so nothing more may be done."""


@dataclass(slots=True)
class Tenure:
    """A lease while it is held: `revision` fences what is written under it."""

    role: str
    revision: int
    until_s: float
    """On the loop's clock: from then on nothing may be done."""

    def check(self) -> int:
        """The fencing token, right before an act; LeaseLostError once the tenure is over."""
        if asyncio.get_running_loop().time() >= self.until_s:
            msg = f"the lease of {self.role} could not be renewed in time"
            raise LeaseLostError(msg)
        return self.revision


class Leases:
    """One process's hold on leases, and its proof that the bus takes writes."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self._bus = bus
        self._holder = holder
        self.proved_s = 0.0
        """When a renewal, ours or the holder's, was last seen to succeed, on the loop's clock."""

    @asynccontextmanager
    async def hold(self, role: str) -> AsyncIterator[Tenure]:
        """Wait for the lease, then hold it around the body, which is cancelled when it is lost.

        Raises:
            LeaseLostError: the body was cut short, or wanted to act after its time.
        """
        tenure = await self._acquired(role)
        log.info("holds the lease of %s", role, extra={"code": "lease_held"})
        limit = asyncio.timeout_at(tenure.until_s)
        try:
            async with limit, background() as tasks:
                tasks.start(self._renew(tenure, limit))
                yield tenure
        except TimeoutError as error:
            if not limit.expired():
                raise
            msg = f"the lease of {role} was lost"
            raise LeaseLostError(msg) from error
        finally:
            await self._give_back(tenure)

    # --- getting it -----------------------------------------------------------------------
    async def _acquired(self, role: str) -> Tenure:
        """Try until it is ours; a lease that nobody renewed for longer than its TTL is free."""
        loop = asyncio.get_running_loop()
        revision, since_s = -1, loop.time()
        while True:
            try:
                entry = await self._bus.get(subjects.lease(role))
                before, revision = revision, entry.revision if entry is not None else 0
                if revision != before:
                    since_s = loop.time()
                    if before > 0 and entry is not None and entry.kind is EntryKind.PUT:
                        self.proved_s = since_s
                if self._free(entry) or loop.time() - since_s > TTL_S + MARGIN_S:
                    return await self._taken(Tenure(role, revision, 0.0))
            except ConflictError:
                continue
            except BusError as error:
                log.debug("lease of %s: %s", role, error)
            await asyncio.sleep(LOOK_S)

    def _free(self, entry: Entry | None) -> bool:
        """False also for one that nobody can read: it is taken once it was not renewed in time."""
        if entry is None or entry.kind is EntryKind.PURGE:
            return True
        try:
            return read_stored(Lease, entry.key, entry.value).holder == self._holder
        except VirtbusError as error:
            log.warning("unreadable %s: %s", entry.key, error, extra={"code": "bad_lease"})
            return False

    async def _taken(self, tenure: Tenure) -> Tenure:
        """Write the lease over the revision that was read."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        key, body = subjects.lease(tenure.role), encode(Lease(holder=self._holder))
        tenure.revision = await self._bus.put(key, body, expect=tenure.revision, ttl_s=TTL_S)
        tenure.until_s = asked_s + TTL_S - MARGIN_S
        self.proved_s = loop.time()
        return tenure

    # --- keeping it -----------------------------------------------------------------------
    async def _renew(self, tenure: Tenure, limit: asyncio.Timeout) -> None:
        """Renew until it is lost, then end the body."""
        pause_s = RENEW_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = RENEW_S
            try:
                tenure.check()
                await self._taken(tenure)
                _end_at(limit, tenure.until_s)
            except (ConflictError, LeaseLostError):
                if not await self._still_ours(tenure):
                    break
                pause_s = 0.0
            except BusError as error:
                log.info("renewal of %s: %s", tenure.role, error, extra={"code": "lease_late"})
                pause_s = AGAIN_S
        tenure.until_s = 0.0
        _end_at(limit, 0.0)

    async def _still_ours(self, tenure: Tenure) -> bool:
        """After a conflict: True when it was with a write of our own whose answer was lost."""
        try:
            tenure.check()
            entry = await self._bus.get(subjects.lease(tenure.role))
        except (BusError, LeaseLostError):
            return False
        if entry is None or entry.kind is EntryKind.PURGE or not self._free(entry):
            return False
        tenure.revision = entry.revision
        return True

    async def _give_back(self, tenure: Tenure) -> None:
        """Let the next one begin at once, where nobody has."""
        tenure.until_s = 0.0
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._bus.purge(
                    subjects.lease(tenure.role),
                    expect=tenure.revision,
                    marker_ttl_s=MARKER_TTL_S,
                )
        except (BusError, TimeoutError) as error:
            log.debug("lease of %s ends by its TTL: %s", tenure.role, error)


def _end_at(limit: asyncio.Timeout, until_s: float) -> None:
    if not limit.expired():
        limit.reschedule(until_s)
