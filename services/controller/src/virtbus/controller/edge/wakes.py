"""Merges requests for calls: each function is called at most once in a turn of the event loop."""

import asyncio
from collections.abc import Callable


class Wakes:
    """The functions to call after a change.

    An informer requests the calls for each entry, and may read many entries in one turn.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._due = False

    def request(self) -> None:
        """Call all functions in the next turn of the event loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._due = False
        for call in self.calls:
            call()
