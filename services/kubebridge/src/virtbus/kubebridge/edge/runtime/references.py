"""Watches the objects that a reconcile waits for, and queues its key when one changes.

A watch covers one kind in one namespace, and runs while somebody waits there. It gets metadata only
(ADR 0038).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from virtbus.bus.sources import REAL, Sources
from virtbus.bus.tasks import Background, background
from virtbus.kubebridge.core.objects.plain import Object, key
from virtbus.kubebridge.core.runtime.kinds import Key, Kind, key_of
from virtbus.kubebridge.edge.cluster import Cluster, Scope
from virtbus.kubebridge.edge.runtime.reflector import Reflector


class _Place(NamedTuple):
    kind: Kind
    namespace: str


class References:
    """The index of references, with a watch for each kind and namespace in it."""

    def __init__(
        self, cluster: Cluster, add: Callable[[Key], None], sources: Sources = REAL
    ) -> None:
        self._cluster = cluster
        self._add = add
        self._sources = sources
        self._of: dict[Key, frozenset[Key]] = {}
        self._waiting: dict[Key, set[Key]] = defaultdict(set)
        """The keys that wait for an object. It is the inverse of `_of`."""
        self._watches: dict[_Place, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def wait(self, who: Key, references: frozenset[Key]) -> None:
        """Queue `who` when one of the objects changes. This replaces what it waited for before."""
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

    async def run(self) -> None:
        """Start and end watches until cancelled."""
        async with background() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._follow(tasks)

    def _follow(self, tasks: Background) -> None:
        wanted = {_Place(one.kind, one.namespace) for one in self._waiting}
        for place in self._watches.keys() - wanted:
            self._watches.pop(place).cancel()
        for place in wanted - self._watches.keys():
            scope = Scope(place.namespace, metadata_only=True)
            sink = _Sink(place.kind, self._notify)
            reflector = Reflector(
                self._cluster, place.kind, sink, scope=scope, sources=self._sources
            )
            self._watches[place] = tasks.start(reflector.run())

    def _notify(self, changed: Key) -> None:
        for who in tuple(self._waiting.get(changed, ())):
            self._add(who)


class _Sink:
    """Passes on the names of changed objects, and keeps none."""

    def __init__(self, kind: Kind, notify: Callable[[Key], None]) -> None:
        self._kind = kind
        self._notify = notify

    def put(self, obj: Object) -> None:
        self._notify(key_of(self._kind, key(obj)))

    deleted = put

    def retain(self, names: set[str]) -> None:
        """Do nothing: who waits for an object does not need to know that it is still missing."""
