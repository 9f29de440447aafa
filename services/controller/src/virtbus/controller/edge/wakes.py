"""Calls functions once in a turn of the event loop, however often that is requested."""

import asyncio
from collections.abc import Callable


class Wakes:
    """The functions to call. An informer requests them for each entry, and reads many in a turn."""

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
