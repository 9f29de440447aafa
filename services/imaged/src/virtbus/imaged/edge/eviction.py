"""Removes unused images when a transfer needs room, in the order of `core.eviction`."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Protocol

from virtbus.imaged.core.eviction import StoredImage, evicted
from virtbus.imaged.core.expiry import NameUse
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.uploaded_names import uploaded_names

log = logging.getLogger(__name__)

DECISION_S = 10.0


class DiskHolders(Protocol):
    """The method of `edge.image_users.ImageUsers` that `Eviction` uses."""

    def images_in_use(self) -> frozenset[str] | None: ...


class Names(Protocol):
    """The method of `edge.alias_files.AliasFiles` that `Eviction` uses."""

    def pinned(self, names: Iterable[str]) -> frozenset[str]: ...


class Eviction:
    """Frees space of the store.

    Each use of an image begins on the event loop, and images to remove are chosen on the event
    loop. So no image is removed between its pull and the making of its disk. `wanted` returns the
    image references in the records of the node's VMs, or None before all records are known.
    """

    def __init__(
        self,
        store: ImageStore,
        disks: DiskHolders,
        names: Names,
        wanted: Callable[[], frozenset[str] | None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._disks = disks
        self._names = names
        self._wanted = wanted
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._one = threading.Lock()

    def make_room(self, missing_bytes: Callable[[], int]) -> None:
        """Remove images until no bytes are missing, or none if that is impossible.

        Runs in a disk thread.
        """
        with self._one:
            need_bytes = missing_bytes()
            if need_bytes <= 0:
                return
            began_ns = time.monotonic_ns()
            used = self._disks.images_in_use()
            if used is None:
                log.warning(
                    "no image is evicted: a disk cannot be read", extra={"code": "no_eviction"}
                )
                return
            sizes = self._store.space.image_sizes()
            pins = self._names.pinned(self._store.plain_names()) | uploaded_names(self._store)
            result: Future[tuple[str, ...]] = Future()

            def decide() -> None:
                if result.set_running_or_notify_cancel():
                    stored = self._stored(sizes, used, pins, began_ns)
                    result.set_result(self._chosen(stored, need_bytes))

            try:
                self._loop.call_soon_threadsafe(decide)
                digests = result.result(DECISION_S)
            except (RuntimeError, TimeoutError, CancelledError):  # the service stops, or hangs
                result.cancel()
                return
            self._store.discard(digests)
        for digest in digests:
            log.info(
                "image %s removed: its space is needed", digest, extra={"code": "image_evicted"}
            )
        if digests:
            self._loop.call_soon_threadsafe(self._changed)

    def _chosen(self, stored: Iterable[StoredImage], need_bytes: int) -> tuple[str, ...]:
        """Choose images to remove, and take them out of the index. Runs on the event loop."""
        digests = evicted(stored, need_bytes)
        self._store.forget(digests)
        return digests

    def _stored(
        self, sizes: Mapping[str, int], used: frozenset[str], pins: frozenset[str], began_ns: int
    ) -> Iterator[StoredImage]:
        """Yield all images; none before all records are known. `used` are the digests of disks."""
        wanted = self._wanted()
        if wanted is None:
            return
        uses: dict[str, list[NameUse]] = {}
        for use in self._store.uses(used):
            link = self._store.link(use.name)
            if link is not None:
                uses.setdefault(link.digest, []).append(use)
        kept, busy = wanted | pins, used | self._store.busy(began_ns)
        for digest in self._store.digests:
            names = uses.get(digest, [])
            yield StoredImage(
                digest,
                sizes.get(digest, 0),
                max((use.used_s for use in names), default=0.0),
                held=digest in busy or any(use.name in kept for use in names),
                plain=any(use.is_plain for use in names),
            )
