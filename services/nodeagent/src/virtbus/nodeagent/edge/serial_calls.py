"""Limits calls to one at a time for each guest."""

import asyncio


class SerialCalls:
    """Allows one call per guest.

    A call lasts until libvirt returns from it, even if its caller was cancelled.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Event] = {}

    async def begin(self, uid: str) -> None:
        while (earlier := self._under_way.get(uid)) is not None:
            await earlier.wait()
        self._under_way[uid] = asyncio.Event()

    def end(self, uid: str) -> None:
        self._under_way.pop(uid).set()
