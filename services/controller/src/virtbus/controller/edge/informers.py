"""Updates the cached fleet from one watch for each bucket; a watch lists again after an outage.

After a restore of the bus in place, the list has lower revisions than the cache. Even then the
listed values replace the cached values.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError
from virtbus.controller.core.backup_schedules import BackupSchedules
from virtbus.controller.core.bucket_list import BucketList
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.networks import Networks
from virtbus.controller.core.node_values import NodeValues
from virtbus.controller.core.operations import Operations
from virtbus.controller.core.security_groups import SecurityGroups
from virtbus.controller.core.snapshots import Snapshots
from virtbus.controller.core.volumes import Volumes
from virtbus.controller.edge.key_states import unreadable
from virtbus.controller.edge.wakes import Wakes
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import DeadLetter
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.image_name import ImageNameRecord
from virtbus.schemas.node import HostAddresses
from virtbus.schemas.overlay import OverlayPeer
from virtbus.schemas.records import of_node_group, of_operation

log = logging.getLogger(__name__)

_NAMED = (
    *(subjects.VOLUME_KEYS, subjects.SNAPSHOT_KEYS),
    *(subjects.IMAGE_NAME_KEYS, subjects.NETWORK_KEYS, subjects.SECURITY_GROUP_KEYS),
    subjects.BACKUP_SCHEDULE_KEYS,
)
_Cache = (
    Volumes
    | Snapshots
    | NamedRecords[ImageNameRecord]
    | Networks
    | SecurityGroups
    | BackupSchedules
)
_NodeValues = NodeValues[HostAddresses] | NodeValues[OverlayPeer]
WAITING = f"$KV.vm.{UNPLACED}."
LOOK_AGAIN_S = 30.0
MOVE_S = 2.0
"""Time to wait for the put that follows a move's purge. A move writes both in one batch. If the put
does not arrive, a person has purged the key."""


class Informers:
    """Updates the fleet from the bus."""

    def __init__(self, bus: Bus, fleet: Fleet, watches: WatchServer) -> None:
        self._bus = bus
        self._fleet = fleet
        self._watches = watches
        self._lists = {name: asyncio.Event() for name in ("vm", "st", "node")}
        self.wakes = Wakes()
        """Wakes the tasks that depend on the fleet, after each entry."""
        self.released: asyncio.Queue[str] = asyncio.Queue()
        """Uids of VMs whose record or status has changed, and whose release may be complete."""

    @property
    def listed(self) -> bool:
        """Return True once each of the three buckets has been listed completely."""
        return all(event.is_set() for event in self._lists.values())

    async def synced(self) -> None:
        """Wait until each of the three buckets has been listed completely."""
        for event in self._lists.values():
            await event.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("vm", self._vm, self._known_in_vm))
            group.create_task(self._follow("st", self._status, self._known_in_st))
            group.create_task(self._follow("node", self._node, dict))
            group.create_task(self._look_again())

    async def _look_again(self) -> None:
        """Forget unreadable values whose keys have expired: no message reports that."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            for found in self._fleet.damaged:
                with suppress(BusError):
                    entry = await self._bus.get(found.key)
                    if entry is None:
                        self._fleet.damaged.discard(found.key)

    async def _follow(
        self,
        bucket: str,
        take: Callable[[Entry], str | None],
        known: Callable[[], dict[str, int]],
    ) -> None:
        listing = BucketList()
        async with self._bus.watch(f"$KV.{bucket}.>") as watch:
            async for item in watch:
                if item is WatchMark.RESET:
                    damaged = self._fleet.damaged.in_bucket(bucket)
                    listing.begin(known() | dict.fromkeys(damaged, 0))
                    self._begin_list(bucket)
                elif item is WatchMark.SYNCED:
                    self._forget(bucket, listing.end())
                    if listing.repeat:
                        watch.relist()
                    self._lists[bucket].set()
                elif isinstance(item, Entry):
                    if item.kind is EntryKind.PUT and listing.incomplete:
                        names = {_name(item.key), item.key}
                        self._forget(bucket, listing.outdated(names, item.revision))
                    self._changed(self._take(take, item))
                    self.wakes.request()

    def _begin_list(self, bucket: str) -> None:
        """Forget the highest revisions seen: a restored bus continues at lower revisions."""
        fleet = self._fleet
        fleet.quiet_since_s = asyncio.get_running_loop().time()
        if bucket == "st":
            fleet.status_revision = 0
        elif bucket == "vm":
            fleet.revision = 0
            fleet.operations.begin_list()
            for cache in _caches(fleet):
                cache.begin_list()

    def _take(self, take: Callable[[Entry], str | None], entry: Entry) -> str | None:
        try:
            uid = None
            if of_operation(entry.key):
                _take_operation(self._fleet.operations, entry)
            else:
                uid = take(entry)
        except VirtbusError as error:
            # An invalid value must not stop the watch; the last valid value stays (MSG-16).
            found = unreadable(entry, error)
            if self._fleet.damaged.add(found):
                log.error("unreadable %s: %s", entry.key, error, extra={"code": "bad_record"})
                self._bury(entry, error)
            return found.uid if found.uid in self._fleet.vms else None
        self._fleet.damaged.discard(entry.key)
        return uid

    def _bury(self, entry: Entry, error: VirtbusError) -> None:
        """Emit a dead letter. All controllers use one message id, so the stream keeps one copy."""
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

    def _forget(self, bucket: str, missing: Iterable[str]) -> None:
        """Drop the values that a complete list lacks; `missing` has uids and complete keys."""
        for uid in missing:
            if uid.startswith("$KV."):
                self._forget_key(uid)
            elif bucket == "vm":
                self._changed(self._fleet.drop_vm(uid, self._fleet.revision))
            else:
                for key in [key for key in self._fleet.statuses if key[1] == uid]:
                    self._fleet.purge_status(subjects.vm_status(*key), 0)
                self._changed(uid)

    def _forget_key(self, key: str) -> None:
        """Drop the value of a key that was unreadable, or that belongs to no VM."""
        fleet = self._fleet
        fleet.damaged.discard(key)
        if of_operation(key):
            fleet.operations.forget(key)
        elif key.endswith((f".{subjects.HOST_KEY}", f".{subjects.JOIN_KEY}")):
            fleet.offer(fleet.hosts.forget(key))
        elif key.endswith(f".{subjects.IMAGES_KEY}"):
            fleet.purge_images(key)
        elif key.endswith(f".{subjects.POOLS_KEY}"):
            fleet.offer(fleet.pools.purge(key))
        elif (cache := _cache_of(fleet, key)) is not None:
            cache.forget(key)
        elif key.startswith(subjects.ADDRESS_KEYS):
            fleet.claims.pop(key, None)
            fleet.addresses.forget(key)
        elif key.endswith(f".{subjects.NODE_SPEC_KEY}"):
            fleet.node_specs.pop(key.split(".")[2], None)
            fleet.offer(key.split(".")[2])

    def _changed(self, uid: str | None) -> None:
        self._watches.changed(uid)
        held = self._fleet.vms.get(uid) if uid is not None else None
        if held is not None and held.may_release:
            self.released.put_nowait(held.record.uid)

    def _known_in_vm(self) -> dict[str, int]:
        """Return the revisions of the cached values of `vm`; 0 for a value without a revision."""
        fleet = self._fleet
        plain = {
            *(subjects.join_nonce(node) for node in fleet.hosts.joined),
            *(key for key in fleet.claims if key.startswith(subjects.ADDRESS_KEYS)),
            *fleet.operations.keys(),
        }
        return {
            **dict.fromkeys(plain, 0),
            **{uid: held.revision for uid, held in fleet.vms.items()},
            **{subjects.node_spec(node): one[1] for node, one in fleet.node_specs.items()},
            **{subjects.node_host(node): one[1] for node, one in fleet.hosts.records.items()},
            **{key: one[1] for key, one in fleet.groups.on_nodes.items()},
            **{key: one[1] for key, one in fleet.hosts.addresses.items()},
            **{key: one[1] for key, one in fleet.hosts.peers.items()},
            **{key: one.revision for cache in _caches(fleet) for key, one in cache.items()},
        }

    def _vm(self, entry: Entry) -> str | None:
        cache = _cache_of(self._fleet, entry.key)
        if cache is not None:
            if entry.kind is EntryKind.PURGE:
                cache.purge(entry.key, entry.revision)
            else:
                cache.put(entry.key, entry.value, entry.revision)
            return None
        if entry.key.endswith(f".{subjects.NODE_SPEC_KEY}"):
            self._node_spec(entry)
            return None
        if entry.key.endswith(f".{subjects.HOST_KEY}"):
            if entry.kind is EntryKind.PUT:
                self._fleet.offer(self._fleet.hosts.put(entry.key, entry.value, entry.revision))
            else:
                node = entry.key.split(".")[2]
                self._fleet.hosts.took(node, None, entry.revision)
                self._fleet.offer(node)
            return None
        return self._vm_record(entry)

    def _node_spec(self, entry: Entry) -> None:
        """Process a node spec. If the fence changed, the views of the node's VMs change too."""
        node = entry.key.split(".")[2]
        before = self._fleet.node_spec_of(node).fenced
        self._vm_record(entry)
        if self._fleet.node_spec_of(node).fenced != before:
            for uid, held in self._fleet.vms.items():
                if held.record.node == node:
                    self._watches.changed(uid)

    def _vm_record(self, entry: Entry) -> str | None:
        uid = _name(entry.key)
        if entry.kind is EntryKind.PURGE:
            gone = self._fleet.purge_vm(entry.key, entry.revision)
            if self._fleet.moving.get(uid) == entry.revision:
                loop = asyncio.get_running_loop()
                loop.call_later(MOVE_S, self._not_moved, uid, entry.revision)
            return gone
        changed = self._fleet.put_vm(entry.key, entry.value, entry.revision, entry.time_ns)
        held = self._fleet.vms.get(uid)
        # Usually the status queues the uid. In two cases the record must queue the uid: a VM
        # without a node gets no status, and a status may arrive before the record is in the cache.
        answered = changed is None and held is not None and held.may_release
        if answered or entry.key.startswith(WAITING):
            self.released.put_nowait(uid)
        return changed

    def _not_moved(self, uid: str, revision: int) -> None:
        self._changed(self._fleet.drop_moved(uid, revision))

    def _known_in_st(self) -> dict[str, int]:
        fleet = self._fleet
        known = fleet.images.known() | fleet.pools.known() | fleet.operations.status_keys()
        return dict.fromkeys({uid for _, uid in fleet.statuses} | known, 0)

    def _status(self, entry: Entry) -> str | None:
        last = entry.key.rpartition(".")[2]
        if last.startswith("_"):  # a key of the node, not of a VM
            if last in {subjects.IMAGES_KEY, subjects.POOLS_KEY}:
                _take_offer(self._fleet, entry, last)
            elif last == subjects.RIVAL_KEY and entry.kind is EntryKind.PUT:
                now_s = asyncio.get_running_loop().time()
                self._fleet.hosts.put_rival(entry.key, entry.value, now_s)
            return None
        if entry.kind is EntryKind.PURGE:
            return self._fleet.purge_status(entry.key, entry.revision)
        return self._fleet.put_status(entry.key, entry.value, entry.revision)

    def _node(self, entry: Entry) -> None:
        if entry.kind is EntryKind.PURGE:
            self._fleet.forget_node(entry.key.removeprefix("$KV.node."))
        else:
            now_s = asyncio.get_running_loop().time()
            self._fleet.put_node(entry.key, entry.value, now_s, self._bus.sources.time_ns())


def _take_offer(fleet: Fleet, entry: Entry, last: str) -> None:
    if last == subjects.POOLS_KEY:
        purged = entry.kind is EntryKind.PURGE
        pools = fleet.pools
        fleet.offer(pools.purge(entry.key) if purged else pools.put(entry.key, entry.value))
    elif entry.kind is EntryKind.PURGE:
        fleet.purge_images(entry.key)
    else:
        fleet.put_images(entry.key, entry.value)


def _caches(fleet: Fleet) -> tuple[_Cache, ...]:
    return (
        *(fleet.volumes, fleet.volumes.snapshots, fleet.images.names),
        *(fleet.networks, fleet.groups, fleet.operations.schedules),
    )


def _cache_of(fleet: Fleet, key: str) -> _Cache | _NodeValues | None:
    """Return the cache of a named object, or of a value for a node; None for other keys."""
    if not key.startswith(_NAMED) and not of_node_group(key):
        return fleet.hosts.values_at(key)
    if key.startswith(subjects.VOLUME_KEYS):
        return fleet.volumes
    if key.startswith(subjects.SNAPSHOT_KEYS):
        return fleet.volumes.snapshots
    if key.startswith(subjects.NETWORK_KEYS):
        return fleet.networks
    if key.startswith(subjects.BACKUP_SCHEDULE_KEYS):
        return fleet.operations.schedules
    return fleet.images.names if key.startswith(subjects.IMAGE_NAME_KEYS) else fleet.groups


def _take_operation(operations: Operations, entry: Entry) -> None:
    if entry.kind is EntryKind.PURGE:
        operations.forget(entry.key)
    else:
        operations.put(entry.key, entry.value, entry.revision)


def _name(key: str) -> str:
    """Return the uid in a VM's key; the complete key if it belongs to a node or an operation."""
    if of_operation(key):
        return key
    last = key.rsplit(".", maxsplit=1)[-1]
    keys = subjects.NODE_SPEC_KEY, subjects.HOST_KEY, subjects.IMAGES_KEY, subjects.POOLS_KEY
    return key if last in keys else last
