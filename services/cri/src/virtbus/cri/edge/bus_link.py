"""Keeps virtbus-cri's connection to the bus.

Without a connection, virtbus-cri still serves its own state.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, OutcomeUnknownError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

AGAIN_S = (0.2, 5.0)
REQUEST_S = 10.0
"""Default time limit of a request."""

Connect = Callable[[], AbstractAsyncContextManager[Bus]]


class BusLink:
    """The connection to the bus. It may be missing at the start and after each loss."""

    def __init__(self, connect: Connect, sources: Sources = REAL) -> None:
        self._connect = connect
        self._bus: Bus | None = None
        self._has = asyncio.Event()
        self.sources = sources
        self.refusal = "the bus has not answered yet"
        """The reason why there is no connection."""

    @property
    def connected(self) -> bool:
        return self._bus is not None and self._bus.connected

    async def run(self) -> None:
        """Stay connected until cancelled. After each failure, connect again."""
        pauses = delays(*AGAIN_S, self.sources)
        while True:
            try:
                async with self._connect() as bus:
                    self._bus = bus
                    self._has.set()
                    await asyncio.get_running_loop().create_future()
            except BusError as error:
                self.refusal = str(error)
                log.warning("no bus: %s", error, extra={"code": "bus_away"})
            finally:
                self._bus = None
                self._has.clear()
            await asyncio.sleep(next(pauses))

    async def bus(self) -> Bus:
        """Wait for a connection and return it. The connection may be lost before its first use."""
        while self._bus is None:
            await self._has.wait()
        return self._bus

    def here(self) -> Bus:
        """Return the connection.

        Raises VirtbusError 503 `bus_away` without a connection.
        """
        if self._bus is None or not self._bus.connected:
            raise away(self.refusal if self._bus is None else "the connection is lost")
        return self._bus

    async def ask(
        self, resource: str, verb: str, value: Any, *, timeout_s: float = REQUEST_S
    ) -> Any:
        """Send a request of the API, and return the answer's data.

        Raises:
            VirtbusError: the error in the answer. 503 `bus_away`: the request had no effect. 504
                `no_answer`: the effect of the request is unknown.
        """
        bus = self.here()
        try:
            return await bus.request(subjects.api(resource, verb), value, timeout_s=timeout_s)
        except OutcomeUnknownError as error:
            message = f"{resource}.{verb} has no answer yet: {error}; repeat the call"
            raise VirtbusError(Code.DEADLINE, "no_answer", message) from error
        except BusError as error:
            raise away(str(error)) from error


def away(reason: str) -> VirtbusError:
    """Return the error 503 `bus_away` for a call that needs the bus."""
    message = (
        f"the bus is away: {reason}; lists, status and logs are served, and this call must be "
        "repeated later"
    )
    return VirtbusError(Code.UNAVAILABLE, "bus_away", message)
