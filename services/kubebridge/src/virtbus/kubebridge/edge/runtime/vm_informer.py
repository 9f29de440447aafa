"""Cache of this cluster's VMs, from virtbus' own watch.

A VM that is missing here may exist, because the list may come from a controller that lags behind.
A VM is certainly gone if the watch reported its end. The same holds if a delete did not find it,
or if its create was refused because its uid is deleted.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, UnavailableError
from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.recent import Recent
from virtbus.kubebridge.core.runtime.controller import Notify
from virtbus.kubebridge.core.translation.mapping import CLUSTER
from virtbus.kubebridge.edge.runtime.store import ENDED_MAX
from virtbus.schemas import subjects
from virtbus.schemas.api import VmWatch
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

SILENT_S = 15.0
"""Seconds of silence that end a watch: three intervals between the watch's heartbeats."""
RENEW_S = 10.0
PAUSE_S = (0.1, 5.0)

NO_REPLY = (AttributeError, KeyError, TypeError, ValueError)
"""Exceptions from a message that is not a valid watch reply."""

Plain = Mapping[str, Any]


class VmInformer:
    """The VMs with this cluster's label, by uid. A VM is kept as bytes, and parsed at each read."""

    def __init__(self, bus: Bus, cluster: str) -> None:
        self._bus = bus
        self._cluster = cluster
        self._views: dict[str, tuple[str, bytes]] = {}
        self._named: dict[str, set[str]] = {}
        """The uids of each `namespace/name`."""
        # Only ENDED_MAX ends are remembered. If an end is forgotten, the next delete or create
        # shows it again.
        self._gone: Recent[str, None] = Recent(ENDED_MAX)
        self._left: Recent[str, None] = Recent(ENDED_MAX)
        """The uids of VMs that left the watch, and have not come back."""
        self._pauses = delays(*PAUSE_S, bus.sources)
        self.notify: Notify = lambda _: None
        self.synced = asyncio.Event()

    def paths(self) -> Iterable[str]:
        return tuple(self._named)

    # --- reading --------------------------------------------------------------------------
    def get(self, uid: str) -> VmView | None:
        stored = self._views.get(uid)
        return None if stored is None else read(VmView, stored[1])

    def marked(self, uid: str) -> bool:
        stored = self._views.get(uid)
        return stored is not None and ORPHANED.encode() in stored[1]

    def gone(self, uid: str) -> bool:
        return uid in self._gone

    def named(self, path: str) -> Collection[str]:
        return tuple(self._named.get(path, ()))

    def ended(self, uid: str) -> None:
        self._drop(uid)
        self._gone[uid] = None

    def answered(self, view: VmView) -> None:
        """Store the VM in an answer, if the cache has no equal or newer revision.

        The answer to a delete may arrive after the VM has left the watch. Such a VM is not stored,
        because no later change would remove it.
        """
        before, left = self.get(view.uid), view.deleting and view.uid in self._left
        newer = before is None or before.revision < view.revision
        if newer and not left and view.uid not in self._gone:
            self._put(view.uid, f"{view.namespace}/{view.name}", encode(view))

    def _put(self, uid: str, path: str, body: bytes) -> None:
        self._drop(uid)
        self._views[uid] = (path, body)
        self._named.setdefault(path, set()).add(uid)

    def _drop(self, uid: str) -> str:
        path, _ = self._views.pop(uid, ("", b""))
        if path:
            self._named[path].discard(uid)
            if not self._named[path]:
                del self._named[path]
        return path

    # --- following ------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except (BusError, VirtbusError, *NO_REPLY) as error:
                log.info("watch of VMs: %s", error, extra={"code": "watch_failed"})
            await asyncio.sleep(next(self._pauses))

    async def _follow(self) -> None:
        loop, want = asyncio.get_running_loop(), VmWatch(labels={CLUSTER: self._cluster})
        listed: set[str] = set()
        renewal, renewed_s = "", loop.time()
        stream = self._bus.request_stream(
            subjects.api("vm", "watch"), want, idle_timeout_s=SILENT_S
        )
        async with stream as replies:
            async for reply in replies:
                renewal = reply.get("renew") or renewal
                if renewal and (reply.get("synced") or loop.time() - renewed_s > RENEW_S):
                    await self._bus.publish(renewal, {})
                    renewed_s = loop.time()
                if reply.get("resync"):
                    return
                for view in reply.get("items") or ():
                    listed.add(self._take(view))
                if reply.get("synced"):
                    for uid in self._views.keys() - listed:
                        self._left[uid] = None
                        self.notify(self._drop(uid))
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
        before, stored = self._views.get(uid), (key, encode(view))
        self._left.pop(uid, None)
        if uid not in self._gone and before != stored:
            self._put(uid, *stored)
            self.notify(key)
        return uid

    def _went(self, uid: str) -> None:
        """Remove a VM that left the watch. Only a VM that was being deleted is certainly gone."""
        view, path = self.get(uid), self._drop(uid)
        self._left[uid] = None
        if view is None:
            return
        if view.deleting:
            self.ended(uid)
        self.notify(path)
