"""Fair turns: one piece of work at a time, in rotation of sources and of their namespaces."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Place = asyncio.Future[None]


class FairTurns:
    """Grants turns in the next round of the event loop, so that all tasks of a round compete."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, deque[Place]]] = {}
        self._busy = self._due = False

    @asynccontextmanager
    async def turn(self, source: str, namespace: str = "") -> AsyncIterator[None]:
        place: Place = asyncio.get_running_loop().create_future()
        of_source = self._waiting.setdefault(source, {})
        of_source.setdefault(namespace, deque()).append(place)
        self._call()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # granted and cancelled in the same round
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._busy = False
        self._call()

    def _call(self) -> None:
        if not self._due and not self._busy and self._waiting:
            self._due = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._due = False
        while not self._busy and self._waiting:
            place = self._next()
            if not place.done():
                self._busy = True
                place.set_result(None)

    def _next(self) -> Place:
        source, of_source = next(iter(self._waiting.items()))
        namespace, places = next(iter(of_source.items()))
        place = places.popleft()
        del self._waiting[source], of_source[namespace]
        if places:
            of_source[namespace] = places
        if of_source:
            self._waiting[source] = of_source
        return place
