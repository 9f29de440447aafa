"""Watches of the objects for which keys wait. A change queues the waiting keys.

A watch covers one kind in one namespace, and runs while a key waits for such an object. A watch
gets metadata only (ADR 0039). Without permission to watch, the waiting keys are queued after
growing delays. Their reconciles then read the objects again.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.objects.unstructured import key, text
from virtbus.kubebridge.core.runtime.controller import Key, Kind, key_of
from virtbus.kubebridge.edge.cluster import KubernetesApi, Scope, StatusError
from virtbus.kubebridge.edge.runtime.reflector import PAUSE_S

log = logging.getLogger(__name__)


_Place = tuple[Kind, str]
"""A kind and a namespace: the first two fields of a key."""


class References:
    """The objects for which keys wait, with a watch for each kind and namespace of them."""

    def __init__(
        self, cluster: KubernetesApi, add: Callable[[Key], None], sources: Sources = REAL
    ) -> None:
        self._cluster = cluster
        self._add = add
        self._sources = sources
        self._of: dict[Key, frozenset[Key]] = {}
        self._waiting: dict[Key, set[Key]] = defaultdict(set)
        """The keys that wait for each object: the inverse of `_of`."""
        self._watches: dict[_Place, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def wait(self, who: Key, references: frozenset[Key]) -> None:
        """Queue `who` when one of the objects changes.

        The objects replace those of an earlier call for `who`.
        """
        before = self._of.pop(who, frozenset())
        for one in before - references:
            self._waiting[one].discard(who)
            if not self._waiting[one]:
                del self._waiting[one]
        if references:
            self._of[who] = references
            for one in references:
                self._waiting[one].add(who)
        if before != references:
            self._changed.set()
        if any(one[:2] in self._watches for one in references - before):
            self._add(who)  # a running watch may have reported a change before this call

    async def run(self) -> None:
        async with background() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                wanted = {one[:2] for one in self._waiting}
                for place in self._watches.keys() - wanted:
                    self._watches.pop(place).cancel()
                for place in wanted - self._watches.keys():
                    self._watches[place] = tasks.start(self._watch(*place))

    async def _watch(self, kind: Kind, namespace: str) -> None:
        """Watch until cancelled.

        A watch without a version begins with all existing objects. The bridge therefore needs
        neither a list nor the permission to list.
        """
        scope, version = Scope(namespace, metadata_only=True), ""
        pauses = delays(*PAUSE_S, self._sources)
        while True:
            try:
                async for event in self._cluster.watch(kind, version, scope):
                    pauses = delays(*PAUSE_S, self._sources)
                    version = text(event.object, "metadata", "resourceVersion")
                    if event.type != "BOOKMARK":
                        self._notify(key_of(kind, key(event.object)))
            except StatusError as answer:
                version = version if answer.transient else ""
                level = logging.INFO if answer.transient or answer.code == 410 else logging.WARNING
                extra = {"code": "watch_failed"}
                log.log(level, "%s in %s: %s", kind.plural, namespace, answer, extra=extra)
                if answer.code == 403:
                    self._notify(*(one for one in self._waiting if one[:2] == (kind, namespace)))
            await asyncio.sleep(next(pauses))

    def _notify(self, *changed: Key) -> None:
        for who in {who for one in changed for who in self._waiting.get(one, ())}:
            self._add(who)
