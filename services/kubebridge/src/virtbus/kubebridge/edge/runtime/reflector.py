"""Reflector: lists and watches objects without missing a change.

A reflector lists the objects, and then watches from the list's version on. Bookmarks keep the
version recent. After the end of a watch, 429, 5xx or a timeout, the reflector resumes the watch.
After any other error it lists everything again, and removes objects that are missing in the list.
Such an error is 410: the API server no longer knows the version.

An API server that was restored to an older state knows no later version. It sends no changes until
it reaches that version, so `list_again` ends the watch.
"""

import asyncio
import logging
from contextlib import suppress

from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.kubebridge.core.objects.unstructured import Object, key, text
from virtbus.kubebridge.core.runtime.controller import Kind
from virtbus.kubebridge.edge.cluster import (
    EVERYTHING,
    KubernetesApi,
    Scope,
    StatusError,
)
from virtbus.kubebridge.edge.runtime.store import ObjectStore

log = logging.getLogger(__name__)

PAUSE_S = (0.1, 10.0)
"""First and longest delay between retries, in seconds."""
LASTS_S = 5.0
"""A watch that ends within these seconds without an event counts as failed."""


class Reflector:
    """Keeps `objects` in sync with the cluster."""

    def __init__(
        self,
        cluster: KubernetesApi,
        kind: Kind,
        objects: ObjectStore,
        *,
        scope: Scope = EVERYTHING,
        sources: Sources = REAL,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._objects = objects
        self._scope = scope
        self._sources = sources
        self._version = ""
        self._pauses = delays(*PAUSE_S, sources)
        self._lasts: asyncio.Timeout | None = None
        """The time limit of the present watch. `list_again` sets it to the present time."""
        self.synced = asyncio.Event()
        """Set once a complete list is stored."""

    async def run(self) -> None:
        while True:
            try:
                if self._version:
                    await self._watch_until_relisted()
                else:
                    await self._list()
            except StatusError as answer:
                pause_s = max(answer.retry_after_s, next(self._pauses))
                if not answer.transient:  # the version is useless: list again
                    self._version = ""
                level = logging.INFO if answer.transient or answer.code == 410 else logging.WARNING
                log.log(
                    level,
                    "%s: %s; retrying in %.1f s",
                    self._kind.plural,
                    answer,
                    pause_s,
                    extra={"code": "watch_failed"},
                )
                await asyncio.sleep(pause_s)

    def list_again(self) -> None:
        self._version = ""
        self._objects.restored()
        lasts, self._lasts = self._lasts, None
        if lasts is not None:
            lasts.reschedule(asyncio.get_running_loop().time())

    async def _watch_until_relisted(self) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as self._lasts:
                    await self._watch()
        finally:
            self._lasts = None

    async def _list(self) -> None:
        seen: set[str] = set()
        version = ""
        async for page in self._cluster.pages(self._kind, self._scope):
            for obj in page.items:
                seen.add(self._take(obj))
            version = page.resource_version
        self._objects.retain(seen)
        self._version = version
        self.synced.set()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        begun_s, worked = loop.time(), False
        async for event in self._cluster.watch(self._kind, self._version, self._scope):
            if event.type == "DELETED":
                self._objects.deleted(event.object)
            elif event.type in {"ADDED", "MODIFIED"}:
                self._take(event.object)
            if self._version:  # empty after `list_again`
                version = text(event.object, "metadata", "resourceVersion")
                self._version = version or self._version
            worked = True
            self._pauses = delays(*PAUSE_S, self._sources)
        if worked or loop.time() - begun_s > LASTS_S:
            self._pauses = delays(*PAUSE_S, self._sources)
        else:
            await asyncio.sleep(next(self._pauses))

    def _take(self, obj: Object) -> str:
        """Store an object with its kind, which the items of a list lack. Return its key."""
        named = {"apiVersion": self._kind.api_version, "kind": self._kind.kind, **obj}
        self._objects.put(named)
        return key(obj)
