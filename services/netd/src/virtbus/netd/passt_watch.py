"""Restarts passt when it ends under a running guest, and reports the repair.

When passt or its relay ends, both end, and the kernel removes the tap and the namespace that they
held. A comparison of the VM's network with the host then restores both.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from virtbus.netd.attachments import Attachments
from virtbus.netd.core.finding import NetworkFinding
from virtbus.netd.edge.passt_attacher import PasstAttacher
from virtbus.netd.edge.passt_processes import forget
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""The pause between two rounds, against a fast loop if passt always ends at once."""
MOST_UNREPORTED = 256


class PasstWatch:
    """Follows the processes of all interfaces by their pidfds, from `begin` on."""

    def __init__(self, passt: PasstAttacher, attachments: Attachments) -> None:
        self._passt = passt
        self._attachments = attachments
        self._ended: set[str] = set()
        self._wake = asyncio.Event()
        self._found: asyncio.Queue[NetworkFinding] = asyncio.Queue(MOST_UNREPORTED)

    def begin(self) -> None:
        """Follow each process that netd starts or adopts from now on."""
        loop = asyncio.get_running_loop()

        def follow(uid: str, process: int) -> None:  # called in other threads
            loop.call_soon_threadsafe(loop.add_reader, process, self._see_end, uid, process)

        self._passt.started = follow

    def _see_end(self, uid: str, process: int) -> None:
        asyncio.get_running_loop().remove_reader(process)
        forget(process)
        self._ended.add(uid)
        self._wake.set()

    async def run(self) -> None:
        """Mend networks whose passt has ended, also without the bus. Never returns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            uids, self._ended = self._ended, set()
            try:
                for finding in await self._attachments.compare(uids):
                    extra = {"code": "passt_ended", "uid": finding.attachment.uid}
                    log.warning("%s", finding.message, extra=extra)
                    if not self._found.full():
                        self._found.put_nowait(finding)
            except (VirtbusError, OSError) as error:
                log.warning("passt was not started: %s", error, extra={"code": "passt_failed"})
            await asyncio.sleep(PAUSE_S)

    async def report(self, send: Callable[[NetworkFinding], Awaitable[None]]) -> None:
        """Send each finding of `run`, including earlier findings. Never returns."""
        while True:
            await send(await self._found.get())
