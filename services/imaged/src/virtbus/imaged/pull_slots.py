"""Assigns a node's pull slots by the rules of `core.pull_schedule`."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.pull_schedule import Pull, gives_way, next_of
from virtbus.imaged.single_flight import Flight
from virtbus.schemas.errors import Code, VirtbusError

T = TypeVar("T")
log = logging.getLogger(__name__)

_LOOKS_A_TURN = 4
"""Number of times that a waiting pull looks for a slot, per `slow_turn_s`."""


class Seat:
    """One pull, from its request for a slot to its end. Each stay in a slot is a turn."""

    def __init__(self, order: int, host: str, flight: Flight) -> None:
        self.called = asyncio.Event()
        self.limit: asyncio.Timeout | None = None
        """The timeout of the current turn; None outside a turn."""
        self.held_s = 0.0
        """Seconds of all earlier turns."""
        self._order = order
        self._host = host
        self._flight = flight
        self._yields = 0
        self._began_s = 0.0
        self._began_bytes = 0
        self._settled = False

    def settle(self) -> None:
        """Record that all bytes have arrived: the pull keeps its slot until it ends."""
        self._settled = True
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(None)

    def begin(self, now_s: float) -> None:
        self._began_s, self._began_bytes = now_s, self._flight.moved_bytes

    def end(self, now_s: float, *, gave_way: bool) -> None:
        """End a turn; `gave_way` if another pull gets the slot."""
        self.held_s += now_s - self._began_s
        self._yields += gave_way
        self.limit = None
        self._settled = False
        self.called.clear()

    def as_waits(self) -> Pull:
        return Pull(self._order, self._host, self._flight.namespaces, self._yields)

    def as_runs(self, now_s: float) -> Pull:
        return Pull(
            self._order,
            self._host,
            self._flight.namespaces,
            self._yields,
            now_s - self._began_s,
            self._flight.moved_bytes - self._began_bytes,
            self._settled,
        )


class PullSlots:
    """Runs at most `most` pulls at once."""

    def __init__(self, limits: TransferLimits, most: int) -> None:
        self._limits = limits
        self._most = most
        self._orders = itertools.count()
        self._waiting: list[Seat] = []
        self._running: list[Seat] = []

    async def run(
        self,
        host: str,
        flight: Flight,
        work: Callable[[Seat], Awaitable[T]],
        total_timeout_s: float,
    ) -> T:
        """Return the result of `work`, which begins when there is a slot.

        If another pull needs the slot, `work` is cancelled and later called again. `work` must then
        continue from its partial result. After `Seat.settle`, `work` is not cancelled for another
        pull.

        Raises:
            VirtbusError: 503 `image_unreachable`: the turns of the pull together took longer than
                `total_timeout_s`. The errors of `work`.
        """
        seat = Seat(next(self._orders), host, flight)
        while seat.held_s < total_timeout_s:
            await self._slot(seat)
            gave_way = False
            try:
                async with asyncio.timeout(None) as seat.limit:
                    return await work(seat)
            except TimeoutError:
                gave_way = seat.limit is not None and seat.limit.expired()
                if not gave_way:
                    raise
                log.info("a pull from %s gives way", host, extra={"code": "image_pull_yields"})
            finally:
                self._leave(seat, gave_way=gave_way)
        raise VirtbusError(
            Code.UNAVAILABLE,
            "image_unreachable",
            f"the image did not arrive in {total_timeout_s:g} s of its turns; use a faster "
            "server, or raise the setting pull_timeout_s or its transport's timeout_s",
        )

    async def _slot(self, seat: Seat) -> None:
        self._waiting.append(seat)
        try:
            self._look()
            while seat in self._waiting:
                await wait_for_event(seat.called, self._limits.slow_turn_s / _LOOKS_A_TURN)
                self._look()
        except asyncio.CancelledError:
            self._leave(seat, gave_way=False)
            raise

    def _leave(self, seat: Seat, *, gave_way: bool) -> None:
        if seat in self._running:
            self._running.remove(seat)
            seat.end(asyncio.get_running_loop().time(), gave_way=gave_way)
        else:
            self._waiting.remove(seat)
        self._look()

    def _look(self) -> None:
        """Fill free slots. If pulls still wait, end the turn that `gives_way` chooses, if any."""
        now_s = asyncio.get_running_loop().time()
        while True:
            waiting = {seat.as_waits(): seat for seat in self._waiting}
            running = {seat.as_runs(now_s): seat for seat in self._running}
            first = next_of(waiting, tuple(running), self._most)
            if first is None:
                break
            seat = waiting[first]
            self._waiting.remove(seat)
            self._running.append(seat)
            seat.begin(now_s)
            seat.called.set()
        if not waiting or any(_is_leaving(seat) for seat in self._running):
            return
        last = gives_way(waiting, tuple(running), self._most, self._limits)
        limit = running[last].limit if last is not None else None
        if limit is not None:
            limit.reschedule(now_s)


def _is_leaving(seat: Seat) -> bool:
    return seat.limit is not None and seat.limit.when() is not None
