"""Detects that the bus stores no writes, from reports of the bus's keeper and from probes.

The keeper is the process that runs the NATS server (`virtbus up`). A server with a full disk does
not refuse writes. It leaves them unanswered until it is restarted with free space (nats-server
2.15; F16). Requests that write go through `guarded`, so that clients get an immediate error with
the cause.
"""

import asyncio
import logging

from virtbus.bus.client.ports import Bus, Handler, Request
from virtbus.bus.client.subscriptions import hear
from virtbus.bus.errors import BusError, OutcomeUnknownError, UnavailableError
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.storage import BusStorage

log = logging.getLogger(__name__)

CREATES_UNTIL_FULL = 0.8
"""Creates of VMs stop when the bucket `vm` is full to this fraction, so that deletes still fit."""
OBJECTS_UNTIL_FULL = 0.6
"""Creates of named objects and operations stop at this fraction, so that VMs still fit."""
LOOK_S = 5.0
PROBE_S = 1.5
"""Time limit of a probe. A bus that stores writes answers within milliseconds."""
REPORT_FRESH_S = 15.0
"""A report of the keeper is valid for this time. The keeper repeats it every few seconds."""
_NOTHING = BusStorage.model_construct()
"""The report that counts while no keeper has sent a valid one."""


class BusStorageGuard:
    """The state of the bus's storage. `fill` is the used fraction of the bucket `vm`, 0.0-1.0."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.fill = 0.0
        self._stalled = False
        self._report = _NOTHING
        self._report_s = float("-inf")

    async def run(self) -> None:
        """Update the state; never return."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear())
            while True:
                try:
                    self.fill = await self._bus.fill("vm")
                except BusError as error:
                    log.debug("fill unknown: %s", error)
                if self._stalled:
                    await self.stalls()
                await asyncio.sleep(LOOK_S)

    async def _hear(self) -> None:
        async with self._bus.subscribe(subjects.bus_storage()) as messages:
            await hear(messages, BusStorage, self._keeper_reported)

    def _keeper_reported(self, report: BusStorage) -> None:
        if self._report.stalled and not report.stalled:
            self._stalled = False  # before this report, the keeper has tested every stream
        self._report, self._report_s = report, asyncio.get_running_loop().time()

    # --- answers --------------------------------------------------------------------------
    @property
    def report(self) -> BusStorage:
        """Return the keeper's last report; an empty report if the last one is too old."""
        fresh = asyncio.get_running_loop().time() - self._report_s < REPORT_FRESH_S
        return self._report if fresh else _NOTHING

    @property
    def message(self) -> str:
        """Return a message for people on a known problem of the bus; empty without a problem."""
        if self.report.message:
            return self.report.message
        return _NOT_STORED if self._stalled else ""

    def alarms(self) -> tuple[str, ...]:
        return (self.message,) if self.message else ()

    def refuse_create(self, what: str = "VMs", until: float = CREATES_UNTIL_FULL) -> None:
        """Raise 429 if the fill is at least `until`, or if the keeper reports too little space."""
        if self.fill >= until:
            message = f"the bus is nearly full; delete {what} or raise its max_bytes, then repeat"
            raise VirtbusError(Code.EXHAUSTED, "bus_full", message, after_ms=10_000)
        if self.report.low:
            raise VirtbusError(Code.EXHAUSTED, "bus_full", self.report.message, after_ms=10_000)

    def guarded(self, handler: Handler) -> Handler:
        """Return `handler`, wrapped to raise 503 `bus_storage` while the bus stores nothing."""

        async def handle(request: Request) -> object:
            if self._stalled or self.report.stalled:
                raise self._refusal()
            try:
                return await handler(request)
            except (OutcomeUnknownError, UnavailableError):
                if await self.stalls():
                    raise self._refusal() from None
                raise

        return handle

    async def stalls(self) -> bool:
        """Probe the bus; return True if it answers reads but stores no writes."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._bus.fill("vm")
        except (BusError, TimeoutError):
            return False  # the bus is unreachable, which other code reports
        was = self._stalled
        self._stalled = not await self._stores()
        if self._stalled and not was:
            log.error("the bus stores nothing", extra={"code": "bus_storage"})
        elif was and not self._stalled:
            log.info("the bus stores again", extra={"code": "bus_stores"})
        return self._stalled

    async def _stores(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._bus.purge(subjects.storage_probe("vm"), marker_ttl_s=1)
        except (BusError, TimeoutError):
            return False
        return True

    def _refusal(self) -> VirtbusError:
        message = self.message or _NOT_STORED
        return VirtbusError(
            Code.UNAVAILABLE, "bus_storage", message, retry=Retry.SAME_ID, after_ms=10_000
        )


_NOT_STORED = (
    "the bus answers but stores nothing: its server's disk is full or failing; free space there"
    " (`virtbus up` then repairs it; restart a server of your own), then repeat with the same id;"
    " VMs keep running"
)
