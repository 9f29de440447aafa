"""Caches this cluster's VMs from virtbus' own watch.

A missing view proves nothing: a list may come from a lagging controller. A VM is gone for certain
if a delete did not find it, a create was refused as deleted, or the watch reported its end.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from virtbus.bus.backoff import delays
from virtbus.bus.ports import Bus, BusError, UnavailableError
from virtbus.kubebridge.core.translation.mapping import CLUSTER
from virtbus.kubebridge.edge.objects import Changed, Objects
from virtbus.schemas import subjects
from virtbus.schemas.api import VmWatch
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm import VmView
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

SILENT_S = 15.0
"""Three heartbeats of a watch."""
RENEW_S = 10.0
PAUSE_S = (0.1, 5.0)

NO_REPLY = (AttributeError, KeyError, TypeError, ValueError)
"""Exceptions from a reply that is not a valid watch reply."""

Plain = Mapping[str, Any]


class Views:
    """The VMs with this cluster's label, by uid. They are kept as bytes and parsed at each read."""

    def __init__(self, bus: Bus, cluster: str) -> None:
        self._bus = bus
        self._cluster = cluster
        self._held: dict[str, tuple[str, bytes]] = {}
        self._gone: set[str] = set()
        self._pauses = delays(*PAUSE_S, bus.sources)
        self.listeners: list[Changed] = []
        self.synced = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield the uid and the `namespace/name` of each VM."""
        return iter([(uid, key) for uid, (key, _) in self._held.items()])

    # --- reading --------------------------------------------------------------------------
    def get(self, uid: str) -> VmView | None:
        """Return the VM as it was last seen, or None."""
        held = self._held.get(uid)
        return None if held is None else read(VmView, held[1])

    def marked(self, uid: str) -> bool:
        """Return True if the VM is marked as orphaned."""
        held = self._held.get(uid)
        return held is not None and ORPHANED.encode() in held[1]

    def gone(self, uid: str) -> bool:
        """Return True if the VM is certainly gone."""
        return uid in self._gone

    def ended(self, uid: str) -> None:
        """Note a certain end: a delete found nothing, or a create was refused as deleted."""
        self._held.pop(uid, None)
        self._gone.add(uid)

    def forget_but(self, uids: set[str]) -> None:
        """Forget all certain ends but these."""
        self._gone &= uids

    def answered(self, view: VmView) -> None:
        """Store the VM in an answer, unless the watch is already ahead of it."""
        before = self.get(view.uid)
        if view.uid not in self._gone and (before is None or before.revision < view.revision):
            self._held[view.uid] = (f"{view.namespace}/{view.name}", encode(view))

    # --- following ------------------------------------------------------------------------
    async def run(self) -> None:
        """Watch until cancelled, also across failures of the bus."""
        while True:
            try:
                await self._follow()
            except (BusError, VirtbusError, *NO_REPLY) as error:
                log.info("watch of VMs: %s", error, extra={"code": "watch_failed"})
            await asyncio.sleep(next(self._pauses))

    async def _follow(self) -> None:
        """Run one watch, from a full list to its end."""
        loop, want = asyncio.get_running_loop(), VmWatch(labels={CLUSTER: self._cluster})
        listed: set[str] = set()
        renewal, renewed_s = "", loop.time()
        stream = self._bus.request_stream(
            subjects.api("vm", "watch"), want, idle_timeout_s=SILENT_S
        )
        async with stream as replies:
            async for reply in replies:
                renewal = reply.get("renew") or renewal
                if renewal and loop.time() - renewed_s > RENEW_S:
                    await self._bus.publish(renewal, {})
                    renewed_s = loop.time()
                if reply.get("resync"):
                    return
                for view in reply.get("items") or ():
                    listed.add(self._take(view))
                if reply.get("synced"):
                    self._retain(listed)
                    self._pauses = delays(*PAUSE_S, self._bus.sources)
                    self.synced.set()
                self._changed(reply)
        raise UnavailableError("the watch ended")

    def _changed(self, reply: Plain) -> None:
        if (view := reply.get("change")) is not None:
            self._take(view)
        if uid := reply.get("gone"):
            self._went(uid)

    def _take(self, view: Plain) -> str:
        uid, key = str(view["uid"]), f"{view['namespace']}/{view['name']}"
        before, held = self._held.get(uid), (key, encode(view))
        if uid not in self._gone and before != held:
            self._held[uid] = held
            self._tell(key)
        return uid

    def _went(self, uid: str) -> None:
        """Remove a VM that left the watch. It has ended only if it was being deleted."""
        view, held = self.get(uid), self._held.pop(uid, None)
        if held is None:
            return
        if view is not None and view.deleting:
            self._gone.add(uid)
        self._tell(held[0])

    def _retain(self, uids: set[str]) -> None:
        for uid in self._held.keys() - uids:
            key, _ = self._held.pop(uid)
            self._tell(key)

    def _tell(self, key: str) -> None:
        for changed in self.listeners:
            changed(key)


class Known(NamedTuple):
    """The caches that a reconcile reads."""

    vms: Objects
    vmis: Objects
    views: Views
