"""Holds leases: a lease makes one controller at a time the leader of a role (`$KV.lease.<role>`).

The bus keeps a lease for TTL_S after each renewal. The holder ends its term MARGIN_S earlier,
measured on its own monotonic clock from before it sent the renewal. Therefore the term of a holder
that was suspended or cut off ends before another process can get the lease.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from virtbus.bus.client.ports import Bus, Entry, EntryKind
from virtbus.bus.errors import BusError, ConflictError
from virtbus.bus.runtime.tasks import background
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.lease import Lease
from virtbus.schemas.records import read_stored
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

TTL_S = 15.0
RENEW_S = 4.0
MARGIN_S = 3.0
"""Time between the end of a term and the end of its lease on the bus. MARGIN_S is longer than a
write may take to reach the stream's leader."""
LOOK_S = 2.0
"""Interval at which the lease is checked while another process holds it."""
AGAIN_S = 1.0
GIVE_BACK_S = 1.0
MARKER_TTL_S = 60.0


class LeaseLostError(Exception):
    """The term is over: another process may hold the lease by now."""


@dataclass(slots=True)
class LeaderTerm:
    """A lease while this process holds it; `revision` is the fencing token of its writes."""

    role: str
    revision: int
    until_s: float
    """The end of the term, on the loop's clock."""

    def check(self) -> int:
        """Return the fencing token; call this method right before each effect.

        Raises LeaseLostError once the term is over.
        """
        if asyncio.get_running_loop().time() >= self.until_s:
            msg = f"the lease of {self.role} could not be renewed in time"
            raise LeaseLostError(msg)
        return self.revision


class Leases:
    """The leases of a process. `proved_s` is evidence that the bus accepts writes."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self._bus = bus
        self._holder = holder
        self.proved_s = 0.0
        """The time of the last known renewal by any process, on the loop's clock."""

    @asynccontextmanager
    async def hold(self, role: str) -> AsyncIterator[LeaderTerm]:
        """Wait for the lease, then hold it. The body is cancelled when the lease is lost.

        Raises:
            LeaseLostError: the body was cancelled, or called `check` after its term.
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

    # --- acquire ------------------------------------------------------------------------------
    async def _acquired(self, role: str) -> LeaderTerm:
        """Wait until this process has the lease; return its term.

        A lease counts as free once it has not been renewed for TTL_S + MARGIN_S.
        """
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
                    return await self._taken(LeaderTerm(role, revision, 0.0))
            except ConflictError:
                continue
            except BusError as error:
                log.debug("cannot acquire the lease of %s: %s", role, error)
            await asyncio.sleep(LOOK_S)

    def _free(self, entry: Entry | None) -> bool:
        """Return True if no other process has the lease; an unreadable lease counts as taken."""
        if entry is None or entry.kind is EntryKind.PURGE:
            return True
        try:
            return read_stored(Lease, entry.key, entry.value).holder == self._holder
        except VirtbusError as error:
            log.warning("unreadable %s: %s", entry.key, error, extra={"code": "bad_lease"})
            return False

    async def _taken(self, tenure: LeaderTerm) -> LeaderTerm:
        """CAS the lease over the term's revision; return the term with new revision and end."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        key, body = subjects.lease(tenure.role), encode(Lease(holder=self._holder))
        tenure.revision = await self._bus.put(key, body, expect=tenure.revision, ttl_s=TTL_S)
        tenure.until_s = asked_s + TTL_S - MARGIN_S
        self.proved_s = loop.time()
        return tenure

    # --- renew --------------------------------------------------------------------------------
    async def _renew(self, tenure: LeaderTerm, limit: asyncio.Timeout) -> None:
        """Renew the lease until it is lost, then cancel the body."""
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
                log.info(
                    "cannot renew the lease of %s: %s",
                    tenure.role,
                    error,
                    extra={"code": "lease_late"},
                )
                pause_s = AGAIN_S
        tenure.until_s = 0.0
        _end_at(limit, 0.0)

    async def _still_ours(self, tenure: LeaderTerm) -> bool:
        """Return True if the last write was by this process, and only its answer was lost."""
        try:
            tenure.check()
            entry = await self._bus.get(subjects.lease(tenure.role))
        except (BusError, LeaseLostError):
            return False
        if entry is None or entry.kind is EntryKind.PURGE or not self._free(entry):
            return False
        tenure.revision = entry.revision
        return True

    async def _give_back(self, tenure: LeaderTerm) -> None:
        """Purge the lease if this process still has it, so that the next term can begin at once."""
        tenure.until_s = 0.0
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._bus.purge(
                    subjects.lease(tenure.role),
                    expect=tenure.revision,
                    marker_ttl_s=MARKER_TTL_S,
                )
        except (BusError, TimeoutError) as error:
            log.debug("the lease of %s will expire by its TTL: %s", tenure.role, error)


def _end_at(limit: asyncio.Timeout, until_s: float) -> None:
    if not limit.expired():
        limit.reschedule(until_s)
