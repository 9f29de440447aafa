"""Follows the VMs of this node's pods by `vm.watch`.

The controllers show each runtime only the VMs that the runtime created. A VM that is missing in a
list may still exist, because the controller may lag behind. A VM counts as deleted only after two
reports: first with `deleting`, and then as gone.
"""

import asyncio
import logging
from typing import Protocol

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, UnavailableError
from virtbus.bus.runtime.backoff import delays
from virtbus.cri.edge.bus_link import BusLink
from virtbus.schemas import subjects
from virtbus.schemas.api import VmWatch, WatchReply
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

SILENT_S = 15.0
"""Time without a reply after which a new watch is begun: three intervals of the heartbeats."""
RENEW_S = 10.0
AGAIN_S = (0.1, 5.0)


class Observer(Protocol):
    """The receiver of the VMs' states."""

    async def saw(self, view: VmView) -> None:
        """Note the current state of a VM."""

    async def lost(self, uid: str) -> None:
        """Note that a VM was deleted."""

    def synced(self) -> None:
        """Note that a watch has shown all VMs of its first list."""


class VmWatcher:
    """Runs one watch after another."""

    def __init__(self, link: BusLink, observer: Observer) -> None:
        self._link = link
        self._observer = observer
        self._deleting: set[str] = set()
        self._pauses = delays(*AGAIN_S, link.sources)

    async def run(self) -> None:
        while True:
            bus = await self._link.bus()
            try:
                await self._follow(bus)
            except (BusError, VirtbusError) as error:
                log.info("watch of VMs: %s", error, extra={"code": "watch_failed"})
            await asyncio.sleep(next(self._pauses))

    async def _follow(self, bus: Bus) -> None:
        loop = asyncio.get_running_loop()
        renewal, renewed_s = "", loop.time()
        stream = bus.request_stream(subjects.api("vm", "watch"), VmWatch(), idle_timeout_s=SILENT_S)
        async with stream as replies:
            async for data in replies:
                reply = validate(WatchReply, data)
                renewal = reply.renew or renewal
                if renewal and (reply.synced or loop.time() - renewed_s > RENEW_S):
                    await bus.publish(renewal, {})
                    renewed_s = loop.time()
                if reply.resync:
                    return
                await self._take(reply)
        raise UnavailableError("the watch ended")

    async def _take(self, reply: WatchReply) -> None:
        views = reply.items or ()
        for view in (*views, *((reply.change,) if reply.change is not None else ())):
            if view.deleting:
                self._deleting.add(view.uid)
            await self._observer.saw(view)
        if reply.gone and reply.gone in self._deleting:
            self._deleting.discard(reply.gone)
            await self._observer.lost(reply.gone)
        if reply.synced:
            self._pauses = delays(*AGAIN_S, self._link.sources)
            self._observer.synced()
