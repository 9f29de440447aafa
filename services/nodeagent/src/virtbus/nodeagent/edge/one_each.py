"""One call at a time for each guest, so that none holds more than its own place."""

import asyncio


class OneEach:
    """A call counts until libvirt has returned from it, though its asker may have left."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Event] = {}

    async def begin(self, uid: str) -> None:
        """Wait until no call of this guest is under way; the next one is, until `end`."""
        while (earlier := self._under_way.get(uid)) is not None:
            await earlier.wait()
        self._under_way[uid] = asyncio.Event()

    def end(self, uid: str) -> None:
        """The call has ended."""
        self._under_way.pop(uid).set()
