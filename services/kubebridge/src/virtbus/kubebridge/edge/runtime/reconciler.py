"""Runtime of the controllers: their sources, the work queue, and each reconcile."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from virtbus.bus.client.ports import Bus
from virtbus.kubebridge.core.objects.unstructured import text
from virtbus.kubebridge.core.runtime.controller import (
    Await,
    Controller,
    Inputs,
    Key,
    KeyMapping,
    Kind,
    Notify,
    key_of,
)
from virtbus.kubebridge.edge.bus_groups import BusGroups
from virtbus.kubebridge.edge.cluster import EVERYTHING, KubernetesApi, Scope
from virtbus.kubebridge.edge.runtime.event_recorder import EventRecorder
from virtbus.kubebridge.edge.runtime.executor import Executor
from virtbus.kubebridge.edge.runtime.references import References
from virtbus.kubebridge.edge.runtime.reflector import Reflector
from virtbus.kubebridge.edge.runtime.store import ObjectStore, Slim
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.kubebridge.edge.runtime.workqueue import Lane, WorkQueue

log = logging.getLogger(__name__)

RESYNC_S = 1.0
"""Seconds between checks for dropped keys while this bridge leads."""


class ChangeSource(Protocol):
    """A source of changes outside Kubernetes. It calls `notify` with a changed object's path."""

    notify: Notify

    def paths(self) -> Iterable[str]:
        """Return the paths of all objects."""


class Reconciler:
    """The runtime of one bridge. It reconciles while `leads` is set."""

    def __init__(
        self,
        cluster: KubernetesApi,
        bus: Bus,
        vms: VmInformer,
        recorder: EventRecorder,
        leads: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._sources = bus.sources
        self._leads = leads
        self.stores: dict[Kind, ObjectStore] = {}
        self.reflectors: dict[Kind, Reflector] = {}
        self._others: dict[Kind, ChangeSource] = {}
        self._synced: dict[Kind, asyncio.Event] = {}
        """Set once the initial list of a kind is complete."""
        self._watches: dict[Kind, list[tuple[Kind, KeyMapping]]] = defaultdict(list)
        """For each watched kind: pairs of a kind to reconcile, and the mapping to its keys."""
        self.queue = WorkQueue(leads, bus.sources)
        self.references = References(cluster, self.queue.add, bus.sources)
        self.groups = BusGroups(bus, leads)
        self.executor = Executor(cluster, bus, self.stores, vms, recorder, self.groups)

    # --- wiring ---------------------------------------------------------------------------
    def store(self, kind: Kind, scope: Scope = EVERYTHING, slim: Slim | None = None) -> ObjectStore:
        """Return the store of a Kubernetes kind. A reflector keeps the store in sync."""
        if kind not in self.stores:
            store = self.stores[kind] = ObjectStore(slim)
            store.notify = partial(self._changed, kind)
            self.reflectors[kind] = Reflector(
                self._cluster, kind, store, scope=scope, sources=self._sources
            )
            self._synced[kind] = self.reflectors[kind].synced
        return self.stores[kind]

    def source(self, kind: Kind, source: ChangeSource, synced: asyncio.Event | None = None) -> None:
        """Add a source on the bus. `synced` is set once its initial list is complete."""
        self._others[kind] = source
        source.notify = partial(self._changed, kind)
        if synced is not None:
            self._synced[kind] = synced

    def add(self, controller: Controller) -> None:
        """Add a controller. The sources of its watches must have been added before."""
        watched = {watch.source for watch in controller.watches}

        async def handle(key: Key) -> float:
            await self.until_synced(*watched)
            return await self.reconcile(controller, key)

        lane = Lane(handle, controller.workers, controller.gather_s)
        self.add_lane(controller.kind, lane, controller.watches)

    def add_lane(self, kind: Kind, lane: Lane, watches: Iterable[KeyMapping]) -> None:
        """Add a kind that is reconciled by a function of its own instead of a controller."""
        self.queue.add_lane(kind, lane)
        for watch in watches:
            self._watches[watch.source].append((kind, watch))

    def _changed(self, source: Kind, path: str, *, own: bool = False) -> None:
        """Queue the keys of a changed object. An error in one mapping does not stop the others.

        For the bridge's `own` write, no key of the same kind is queued: the controller of that kind
        made the write.
        """
        for kind, watch in self._watches[source]:
            if own and kind == source:
                continue
            try:
                for key in watch.keys(key_of(source, path)):
                    self.queue.add(key.of(kind))
            except Exception:
                log.exception("%s of %s", kind.kind, path, extra={"code": "watch_failed"})

    # --- running --------------------------------------------------------------------------
    async def run(self) -> None:
        """Run until cancelled. A reconcile waits until the kinds that it watches are listed."""
        async with asyncio.TaskGroup() as group:
            for reflector in self.reflectors.values():
                group.create_task(reflector.run())
            group.create_task(self.references.run())
            group.create_task(self.queue.run())
            group.create_task(self._resync())

    def list_again(self) -> None:
        log.warning(
            "the API server seems restored to an older state; listing all objects again",
            extra={"code": "cluster_restored"},
        )
        for reflector in self.reflectors.values():
            reflector.list_again()

    def synced(self, *kinds: Kind) -> bool:
        return all(self._synced[kind].is_set() for kind in kinds)

    async def until_synced(self, *kinds: Kind) -> None:
        for kind in self._synced.keys() & set(kinds):
            await self._synced[kind].wait()

    async def _resync(self) -> None:
        """Queue every object if this bridge leads and has dropped keys before it led."""
        while True:
            await self._leads.wait()
            if self.queue.dropped:
                self.queue.dropped = False
                for source in self._watches:
                    others = self._others.get(source)
                    for path in others.paths() if others else self.stores[source]:
                        self._changed(source, path)
            await asyncio.sleep(RESYNC_S)

    async def reconcile(self, controller: Controller, key: Key) -> float:
        """Reconcile a key now. Return the seconds before the next reconcile; 0 for none."""
        found = {}
        time_s = asyncio.get_running_loop().time()
        for one in controller.references(key, time_s):
            obj = await self._cluster.get(one.kind, one.name, one.namespace)
            if obj is not None:
                found[one] = obj
        store = self.stores.get(controller.kind)
        read = store.get(key.path) if store is not None else None
        refused = self.executor.refused(key, text(read, "metadata", "uid"))
        inputs = Inputs(read, self._sources.now(), time_s, found, refused)
        actions = controller.reconcile(key, inputs)
        awaited = [one.references for one in actions if isinstance(one, Await)]
        self.references.wait(key, frozenset().union(*awaited))
        try:
            return await self.executor.execute(actions, key, read)
        finally:  # also after a failure: the writes before the failure have taken effect
            for kind, written in self.stores.items():
                while written.writes:
                    self._changed(kind, written.writes.pop(), own=True)
