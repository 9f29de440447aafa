"""Writes statuses: the latest of each VM wins, one put at a time, until the bus has it."""

import asyncio
import logging

from virtbus.bus.backoff import delays
from virtbus.bus.ports import Bus, BusError, ConflictError
from virtbus.nodeagent.core.recovery import WAS_UP
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.fitting import fitted
from virtbus.schemas.records import read_stored
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, VmStatus
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

RETRY_S = (0.1, 5.0)
PASSING = frozenset({VmState.SCHEDULED, VmState.PREPARING, VmState.STARTING})
PASSING_S = 1.0
"""Each put is a durable write; a create passes through these states in half of it."""


class StatusWriter:
    """One VM's status. `report` never waits; `run` is a task of the VM."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._latest: VmStatus | None = None
        self._told: VmStatus | None = None
        self._up = False
        """The bus says that the guest is up."""
        self._revision = 0
        """What is put over. A put that hangs in a broken connection may arrive much later, even
        behind the status's purge: the server refuses it, since it expects what was there then."""
        self._dirty = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self.putting = asyncio.Lock()
        """Held while a put is under way. Who cancels `run` takes it first: a put that nobody waits
        for any more may still be stored, after whatever is asked of the bus next."""

    def report(self, status: VmStatus) -> None:
        """Make `status` the one to be told; an unchanged one is not told again.

        A state on the way is told within PASSING_S, if it is still so then; others at once. So is
        one after which no guest is up any more: nobody shall be told of one that is not there.
        """
        self._latest = status
        if self._up or status.state not in PASSING:
            self._tell()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(PASSING_S, self._tell)

    def _tell(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._dirty.set()

    async def run(self) -> None:
        """Put whatever is latest; never returns by itself."""
        delay_s = RETRY_S[0]
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            status = self._latest
            if status is None or _same(status, self._told):
                continue
            try:
                async with self.putting:
                    self._revision = await self._put(status)
            except BusError as error:
                log.info(
                    "status is told again in %.1f s: %s",
                    delay_s,
                    error,
                    extra={"code": "status_retry", "uid": status.uid},
                )
                await asyncio.sleep(delay_s * self._bus.sources.uniform(0.8, 1.2))
                delay_s = min(delay_s * 2, RETRY_S[1])
                self._dirty.set()
                continue
            self._told, self._up, delay_s = status, status.state in WAS_UP, RETRY_S[0]

    async def _put(self, status: VmStatus) -> int:
        """Put it over what is there, whatever that is: nobody else tells of a VM on this node."""
        key, body = subjects.vm_status(status.node, status.uid), encode(fitted(status))
        try:
            return await self._bus.put(key, body, expect=self._revision)
        except ConflictError:
            await self._there(key)
            return await self._bus.put(key, body, expect=self._revision)

    async def _there(self, key: str) -> bytes:
        """What the bus has at `key`: it is put over from now on."""
        entry = await self._bus.get(key)
        self._revision = entry.revision if entry is not None else 0
        return entry.value if entry is not None else b""

    async def told_before(self, record: VmRecord, *, insist: bool) -> tuple[VmStatus | None, bool]:
        """The last status that an agent told of a VM, and whether what there is could be read.

        With `insist` the bus is asked until it answers.
        """
        extra = {"code": "not_recalled", "uid": record.uid}
        for delay_s in delays(*RETRY_S, self._bus.sources):
            try:
                key = subjects.vm_status(record.node, record.uid)
                body = await self._there(key)
                return self._recalled(read_stored(VmStatus, key, body) if body else None), True
            except VirtbusError as error:
                log.warning("an earlier status is unreadable: %s", error, extra=extra)
                break
            except BusError as error:
                log.info("not recalled: %s", error, extra=extra)
                if not insist:
                    break
            await asyncio.sleep(delay_s)
        return None, False

    def _recalled(self, told: VmStatus | None) -> VmStatus | None:
        """The same: what an earlier agent told stands until it is put over."""
        self._up = told is not None and told.state in WAS_UP
        if self._up and self._latest is not None:
            self._tell()
        return told


def _same(one: VmStatus, other: VmStatus | None) -> bool:
    if other is None:
        return False
    return one.model_copy(update={"updated_ns": other.updated_ns}) == other
