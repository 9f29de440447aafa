"""The watches that keep the fleet: one a bucket, each restarting its list on its own."""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.watching import Watches
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import DeadLetter
from virtbus.schemas.ids import UNPLACED

log = logging.getLogger(__name__)

WAITING = f"$KV.vm.{UNPLACED}."
MOVE_S = 2.0
"""The two halves of a move are one batch; a purge alone is an operator's."""


class Feeds:
    """Feeds the fleet from the bus. `synced` is set once each bucket was listed whole."""

    def __init__(self, bus: Bus, fleet: Fleet, watches: Watches) -> None:
        self._bus = bus
        self._fleet = fleet
        self._watches = watches
        self._lists = {name: asyncio.Event() for name in ("vm", "st", "node")}
        self.listeners: list[Callable[[], None]] = []
        """Called when anything of the fleet may have changed."""
        self._bad: dict[str, int] = {}
        self.released: asyncio.Queue[str] = asyncio.Queue()
        """Uids whose status or record changed: candidates for the end of their delete."""

    async def synced(self) -> None:
        """Return when all three buckets have been listed."""
        for event in self._lists.values():
            await event.wait()

    async def run(self) -> None:
        """Follow all three buckets; never returns by itself."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("vm", self._vm, self._known_in_vm))
            group.create_task(self._follow("st", self._status, self._known_in_st))
            group.create_task(self._follow("node", self._node, set))

    async def _follow(
        self, bucket: str, take: Callable[[Entry], str | None], known: Callable[[], set[str]]
    ) -> None:
        missing: set[str] = set()
        async with self._bus.watch(f"$KV.{bucket}.>") as watch:
            async for item in watch:
                if item is WatchMark.RESET:
                    missing = known()
                    self._fleet.quiet_since_s = asyncio.get_running_loop().time()
                elif item is WatchMark.SYNCED:
                    self._forget(bucket, missing)
                    self._lists[bucket].set()
                elif isinstance(item, Entry):
                    uid = self._take(take, item)
                    if item.kind is EntryKind.PUT:
                        missing.discard(_name(item.key))
                    self._changed(uid)
                    for listener in self.listeners:
                        listener()

    def _take(self, take: Callable[[Entry], str | None], entry: Entry) -> str | None:
        try:
            return take(entry)
        except VirtbusError as error:
            # One bad value must not stop the feed; the last good one stays (MSG-16).
            log.error("unreadable %s: %s", entry.key, error, extra={"code": "bad_record"})
            self._bury(entry, error)
            return None

    def _bury(self, entry: Entry, error: VirtbusError) -> None:
        """Keep word of it, once: the id makes one letter of what every controller meets."""
        if self._bad.get(entry.key) == entry.revision:
            return
        self._bad[entry.key] = entry.revision
        letter = DeadLetter(
            subject=entry.key,
            revision=entry.revision,
            reason=error.reason,
            message=str(error),
            size_bytes=len(entry.value),
            service="controller",
            at_ns=self._bus.sources.time_ns(),
        )
        subject = subjects.dead_letter("controller")
        self._bus.emit(subject, letter, message_id=f"{entry.key}:{entry.revision}")

    def _forget(self, bucket: str, missing: set[str]) -> None:
        """Drop what a complete list no longer names."""
        for uid in missing:
            if uid.endswith(f".{subjects.IMAGES_KEY}"):
                self._fleet.purge_images(uid)
            elif uid.startswith("$KV."):
                self._fleet.purge_vm(uid, self._fleet.revision)
            elif bucket == "vm":
                self._changed(self._fleet.drop_vm(uid, self._fleet.revision))
            else:
                for key in [key for key in self._fleet.statuses if key[1] == uid]:
                    del self._fleet.statuses[key]
                self._changed(uid)

    def _changed(self, uid: str | None) -> None:
        self._watches.changed(uid)
        if uid is not None:
            self.released.put_nowait(uid)

    def _known_in_vm(self) -> set[str]:
        return {*self._fleet.vms, *(subjects.node_wish(node) for node in self._fleet.wishes)}

    def _vm(self, entry: Entry) -> str | None:
        if entry.key.endswith(f".{subjects.WISH_KEY}"):
            self._wish(entry)
            return None
        return self._vm_record(entry)

    def _wish(self, entry: Entry) -> None:
        """What is wanted of a node is shown with its VMs."""
        node = entry.key.split(".")[2]
        before = self._fleet.wish_of(node).fenced
        self._vm_record(entry)
        if self._fleet.wish_of(node).fenced != before:
            for uid, held in self._fleet.vms.items():
                if held.record.node == node:
                    self._watches.changed(uid)

    def _vm_record(self, entry: Entry) -> str | None:
        if entry.kind is EntryKind.PURGE:
            gone = self._fleet.purge_vm(entry.key, entry.revision)
            uid = _name(entry.key)
            if self._fleet.moving.get(uid) == entry.revision:
                loop = asyncio.get_running_loop()
                loop.call_later(MOVE_S, self._not_moved, uid, entry.revision)
            return gone
        if entry.key.startswith(WAITING):  # no node will tell that nothing is left of it
            self.released.put_nowait(_name(entry.key))
        return self._fleet.put_vm(entry.key, entry.value, entry.revision, entry.time_ns)

    def _not_moved(self, uid: str, revision: int) -> None:
        self._changed(self._fleet.drop_moved(uid, revision))

    def _known_in_st(self) -> set[str]:
        return {uid for _, uid in self._fleet.statuses} | self._fleet.images.known()

    def _status(self, entry: Entry) -> str | None:
        if entry.key.endswith(f".{subjects.IMAGES_KEY}"):
            self._images(entry)
            return None
        if entry.kind is EntryKind.PURGE:
            return self._fleet.purge_status(entry.key, entry.revision)
        return self._fleet.put_status(entry.key, entry.value, entry.revision)

    def _images(self, entry: Entry) -> None:
        if entry.kind is EntryKind.PURGE:
            self._fleet.purge_images(entry.key)
        else:
            self._fleet.put_images(entry.key, entry.value)

    def _node(self, entry: Entry) -> None:
        if entry.kind is EntryKind.PURGE:
            self._fleet.forget_node(entry.key.removeprefix("$KV.node."))
        else:
            now_s = asyncio.get_running_loop().time()
            self._fleet.put_node(entry.key, entry.value, now_s, self._bus.sources.time_ns())


def _name(key: str) -> str:
    """What a key is known by: the uid, or the whole key of a node's wish or images."""
    last = key.rsplit(".", maxsplit=1)[-1]
    return key if last in {subjects.WISH_KEY, subjects.IMAGES_KEY} else last
