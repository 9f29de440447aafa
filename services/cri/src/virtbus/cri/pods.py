"""Keeps the node's pods in memory and on disk, and finds sandboxes and containers by id.

A change replaces the pod in memory in one step, and then the file is written. Each call waits for
this write before it answers. Each call holds the lock of its pod. News of VMs change pods without
the lock.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.cri.core import observation
from virtbus.cri.core.pod import Pod, Removal
from virtbus.cri.edge.store import Store
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm_status import VmView

log = logging.getLogger(__name__)

LEAST_PREFIX = 6
"""Minimum length of an abbreviated id. crictl shows abbreviated ids."""


class Pods:
    """The pods of this node, by key."""

    def __init__(self, store: Store, sources: Sources) -> None:
        self._store = store
        self._locks = KeyedLock()
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.sources = sources
        self.all: dict[str, Pod] = {}
        self.removals: dict[str, Removal] = {}
        self.unclaimed: dict[str, str] = {}
        """By uid: the names of this runtime's VMs that belong to no pod, because a pod's file was
        damaged. Only a person deletes such a VM, which may have the last copy of a guest's data."""
        self.doubted: set[str] = set()
        """The keys of pods with a VM that a duty must read again. The watch has shown a view from
        before virtbus-cri's last change: a controller lags behind, or the bus was restored."""
        self.changed: Callable[[Pod | None, Pod | None], None] = lambda _before, _after: None
        """Called after each change, with the pod before and after it. None means no pod."""
        self.duties = asyncio.Event()
        """Set if duties may be due (`duties.py`)."""

    def load(self) -> None:
        """Read all records from disk, before the first call."""
        self.all = self._store.pods.load()
        self.removals = self._store.removals.load()
        for pod in self.all.values():
            self.changed(None, pod)
        self.duties.set()

    def lock(self, key: str) -> asyncio.Lock:
        return self._locks.of(key)

    # --- finding --------------------------------------------------------------------------
    def find_sandbox(self, sandbox_id: str) -> tuple[str, str] | None:
        """Return the pod's key and the full id of a sandbox; None for an unknown sandbox.

        Raises VirtbusError 400 `id_ambiguous`.
        """
        ids = ((key, one.id) for key, pod in self.all.items() for one in pod.sandboxes)
        return _named(ids, sandbox_id)

    def find_container(self, container_id: str) -> tuple[str, str] | None:
        """Return the pod's key and the full id of a container; None for an unknown container.

        Raises VirtbusError 400 `id_ambiguous`.
        """
        ids = ((key, one.id) for key, pod in self.all.items() for one in pod.containers)
        return _named(ids, container_id)

    def of_vm(self, uid: str) -> Pod | None:
        pods = self.all.values()
        return next((pod for pod in pods if pod.machine and pod.machine.uid == uid), None)

    # --- changing -------------------------------------------------------------------------
    async def put(self, pod: Pod) -> None:
        """Store a new or changed pod.

        Raises:
            VirtbusError: 503 `state_unwritable`. The change in memory is undone, if no later change
                has followed.
        """
        before = self.all.get(pod.key)
        if before == pod:
            return
        self._set(pod.key, pod)
        try:
            await self._store.pods.put(pod.key, pod)
        except VirtbusError:
            if self.all.get(pod.key) is pod:
                self._set(pod.key, before)
            raise

    async def drop(self, pod: Pod) -> None:
        """Forget a pod without sandboxes. A duty deletes the pod's VM."""
        if pod.machine is not None:
            await self.discard(pod.machine.uid)
        self._set(pod.key, None)
        await self._store.pods.remove(pod.key)

    async def discard(self, uid: str) -> None:
        """Store the duty to delete a VM."""
        self.removals[uid] = removal = Removal(uid=uid)
        await self._store.removals.put(uid, removal)
        self.duties.set()

    async def discarded(self, uid: str) -> None:
        """Note that the bus has accepted the delete of a VM."""
        self.removals.pop(uid, None)
        await self._store.removals.remove(uid)

    def _set(self, key: str, pod: Pod | None) -> None:
        before = self.all.pop(key, None)
        if pod is not None:
            self.all[key] = pod
        self.changed(before, pod)
        if pod is not None and pod.machine is not None and pod.machine.power_off:
            self.duties.set()
        for event in self._waiting.get(key, ()):
            event.set()

    # --- news of VMs ----------------------------------------------------------------------
    async def saw(self, view: VmView) -> None:
        """Note the current state of a VM (`vm_watch.Observer`)."""
        pod = self.of_vm(view.uid)
        if pod is None and not view.deleting and view.uid not in self.removals:
            self.unclaimed[view.uid] = view.name
        else:
            self.unclaimed.pop(view.uid, None)
        if pod is not None:
            if observation.doubtful(pod, view):
                self.doubted.add(pod.key)
                self.duties.set()
            await self.put(observation.observed(pod, view, self.sources.time_ns()))

    def synced(self) -> None:
        """Log the VMs that belong to no pod (`vm_watch.Observer`)."""
        for uid, name in self.unclaimed.items():
            log.error(
                "VM %s (%s) has no pod here: the pod's file is damaged or gone; look at its disks, "
                "and delete it with `virtbus vm delete %s`",
                uid,
                name,
                uid,
                extra={"code": "vm_without_pod", "uid": uid},
            )

    async def lost(self, uid: str) -> None:
        """Note that a VM was deleted (`vm_watch.Observer`)."""
        self.unclaimed.pop(uid, None)
        pod = self.of_vm(uid)
        if pod is not None:
            await self.put(observation.gone(pod, self.sources.time_ns()))

    async def until(
        self, key: str, reached: Callable[[Pod | None], bool], timeout_s: float
    ) -> bool:
        """Wait until `reached` is true for a pod; return False if it is false after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        with self._listening(key) as event:
            while not reached(self.all.get(key)):
                event.clear()
                if not await wait_for_event(event, deadline_s - loop.time()):
                    return reached(self.all.get(key))
        return True

    @contextmanager
    def _listening(self, key: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(key, None)


def _named(ids: Iterator[tuple[str, str]], wanted: str) -> tuple[str, str] | None:
    """Return the entry whose id is `wanted`, or the only entry whose id begins with `wanted`.

    Raises:
        VirtbusError: 400 `id_ambiguous`: several ids begin with `wanted`.
    """
    found: list[tuple[str, str]] = []
    for key, one in ids:
        if one == wanted:
            return key, one
        if len(wanted) >= LEAST_PREFIX and one.startswith(wanted):
            found.append((key, one))
    if len(found) > 1:
        message = f"the id {wanted!r:.80} matches several; give more characters"
        raise VirtbusError(Code.INVALID, "id_ambiguous", message)
    return found[0] if found else None


def not_found(kind: str, wanted: str) -> VirtbusError:
    """Return the error 404 for an unknown sandbox or container."""
    message = f"there is no {kind} {wanted!r:.80}; list them for their ids"
    return VirtbusError(Code.NOT_FOUND, f"{kind}_not_found", message)
