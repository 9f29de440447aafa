"""Tracks running pulls, so that a delete of an image ends its pulls (IMG-21)."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic

from virtbus.imaged.core.sources import shown
from virtbus.imaged.single_flight import Asker, Flights, T
from virtbus.schemas.errors import Code, VirtbusError


@dataclass(eq=False, slots=True)
class _Pull:
    key: str
    refs: frozenset[str]
    asker: Asker
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RunningPulls(Generic[T]):
    """The pulls, each from its start until its image name is stored, and their transfers."""

    def __init__(self, flights: Flights[T]) -> None:
        self.flights = flights
        self._pulls: dict[_Pull, None] = {}

    @contextmanager
    def running(self, key: str, refs: frozenset[str], asker: Asker) -> Iterator[None]:
        """Track a pull until the context ends.

        `key` is the key of the pull's transfer. `refs` are the references that denote its image.
        """
        pull = _Pull(key, refs, asker)
        self._pulls[pull] = None
        try:
            yield
        finally:
            del self._pulls[pull]
            pull.ended.set()

    async def end(self, ref: str) -> bool:
        """End the pulls of the image `ref`, with all pulls that share a transfer with them.

        Return True if any pull was ended.

        Raises:
            VirtbusError: 409 `image_wanted`: a VM or volume waits for one of these pulls.
        """
        keys = {pull.key for pull in self._pulls if ref in pull.refs}
        pulls = [pull for pull in self._pulls if pull.key in keys]
        for pull in pulls:
            if pull.asker.namespace:
                message = (
                    f"{shown(ref)} is being downloaded for {pull.asker.uid}, a VM or volume of the "
                    f"namespace {pull.asker.namespace}; delete that first, or wait for the image"
                )
                raise VirtbusError(Code.CONFLICT, "image_wanted", message)
        message = f"{shown(ref)} was deleted during its download; pull it again if you need it"
        for key in keys:
            self.flights.end(key, VirtbusError(Code.CONFLICT, "image_deleted", message))
        for pull in pulls:
            await pull.ended.wait()
        return bool(pulls)
