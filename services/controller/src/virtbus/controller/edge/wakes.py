"""Calls functions at most once in a turn of the event loop, after any number of requests."""

import asyncio
from collections.abc import Callable


class Wakes:
    """The functions to call.

    An informer requests the calls once for each entry, and reads many entries in a turn.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._due = False

    def request(self) -> None:
        """Call all functions soon."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._due = False
        for call in self.calls:
            call()
