"""Makes the disks of VMs once, keeps them while the VM exists, and removes them on release."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from virtbus.bus.runtime.recent import Recent
from virtbus.imaged.core import expiry, overlay
from virtbus.imaged.core.disk_requests import (
    DiskRequest,
    made_disk,
    other_medium,
    overlay_size,
    refuse_unfilled,
    released,
    stale,
    wanted_disks,
)
from virtbus.imaged.core.expiry import expired
from virtbus.imaged.core.overlay import Overlay
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.disk_bases import base_of
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.disk_results import Ensured, EnsuredDisk, Gone
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.image_users import ImageUsers
from virtbus.imaged.edge.layer_files import LayerFolder
from virtbus.imaged.edge.origins import begun_with
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.quarantine import QuarantineFiles, QuarantineManifest
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.volume_files import DISK, VolumeNote
from virtbus.imaged.images import Images
from virtbus.imaged.single_flight import Asker, Listener
from virtbus.imaged.snapshot_parts import snapshot_lock
from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.node_rpc import ANY_EPOCH, HeldResources, ImageReady, MadeDisk
from virtbus.schemas.pool import ABILITIES, ON_DEVICES
from virtbus.schemas.quarantine import QuarantineEntry, QuarantineRequest
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

MAX_REMEMBERED = 10_000
"""Number of uids whose epochs are kept in memory. The agent's ledger is the durable copy."""


class Disks:
    """Ensures and releases disks; serial per VM, parallel across VMs."""

    def __init__(
        self,
        images: Images,
        store: ImageStore,
        pools: Pools,
        threads: DiskThreads,
        max_virtual_bytes: int,
        now_ns: Callable[[], int],
    ) -> None:
        self._images = images
        self._store = store
        self._files = pools.files
        self.pools = pools
        self.devices = DeviceVolumes(pools.devices, threads, pools.files.root)
        self._layers = LayerFolder(pools.files.root)
        self._quarantine = QuarantineFiles(pools.files)
        self.users = ImageUsers(pools, self._quarantine)
        self._threads = threads
        self._now_ns = now_ns
        self.recount = asyncio.Event()
        """Set when the quarantine changed, and at the start: its entries must be counted."""
        self.recount.set()
        self._max_virtual_bytes = max_virtual_bytes
        self.locks = DiskLocks()
        self._epochs: Recent[str, int] = Recent(MAX_REMEMBERED)
        self._released: Recent[str, int] = Recent(MAX_REMEMBERED)

    async def ensure(
        self,
        record: VmRecord,
        listener: Listener | None = None,
        logins: Mapping[str, str] = MappingProxyType({}),
    ) -> Ensured:
        """Ensure every disk of the record; existing disks are checked, and grown if too small.

        `logins` are the VM's own pull secrets by volume: a `config.json`, or the query of a URL. An
        image is pulled only if the store lacks it, or if its disk is missing and has the policy
        Always.

        Raises:
            VirtbusError: 400 `disk_too_small`, `disk_too_large`. 409 `stale_epoch`, `released`,
                `disk_damaged`, `disk_mismatch`. 503 `disk_full`, `store_error`. The errors of
                `Images.ensure`, `Pools`, `begun_with`, `DiskFolders.grow` and `LayerFolder.chain`.
        """
        wanted = wanted_disks(record, self._max_virtual_bytes)
        self._fence(record)
        asker = Asker(listener, record.uid, record.namespace)
        async with self.locks.of(record.uid):
            self._fence(record)
            found = await self._all(record, wanted, asker, logins)
        ready = ImageReady(
            uid=record.uid,
            epoch=record.epoch,
            generation=record.generation,
            disks={volume: disk.file for volume, disk in found.items()},
            digest=next((disk.digest for disk in found.values() if disk.digest), ""),
        )
        return Ensured(ready, any(disk.made for disk in found.values()))

    async def _all(
        self,
        record: VmRecord,
        wanted: tuple[DiskRequest, ...],
        asker: Asker,
        logins: Mapping[str, str],
    ) -> dict[str, EnsuredDisk]:
        cached = {disk.volume: self._cached(disk) for disk in wanted}
        with contextlib.ExitStack() as leases:
            for image in cached.values():
                if image is not None:
                    leases.enter_context(self._store.lease(image.digest))
            made = await self._ensured(record, wanted, cached)
            askers = {
                disk.volume: replace(asker, pull_secret=logins.get(disk.volume, disk.query))
                for disk in wanted
            }
            for disk in wanted:
                if disk.volume not in made and disk.source is not None:
                    image = await self._images.ensure(
                        disk.source, askers[disk.volume], disk.pull_policy
                    )
                    leases.enter_context(self._store.lease(image.digest))
                    made |= await self._ensured(record, (disk,), {disk.volume: image})
            for disk in wanted:
                await self._restore(disk, made[disk.volume].digest, askers[disk.volume])
        return made

    async def _ensured(
        self, record: VmRecord, wanted: tuple[DiskRequest, ...], images: dict[str, ImageInfo | None]
    ) -> dict[str, EnsuredDisk]:
        """Run `_ensure_many` under the locks of the volumes, so that none is released meanwhile."""
        async with contextlib.AsyncExitStack() as held:
            refs = [disk.ref for disk in wanted if disk.ref is not None]
            await held.enter_async_context(self.locks.volumes(refs))
            if record.origin is not None:  # no delete of the snapshot until the disks rest on it
                lock = snapshot_lock(record.origin.snapshot)
                await held.enter_async_context(self.locks.of(lock))
            return await self._threads.run(self._ensure_many, record, wanted, images)

    def _cached(self, disk: DiskRequest) -> ImageInfo | None:
        if disk.source is None or disk.pull_policy is ImagePullPolicy.ALWAYS:
            return None
        return self._images.cached(disk.source)

    async def _restore(self, disk: DiskRequest, digest: str, asker: Asker) -> None:
        """Pull the exact image of a disk again, if the store has lost it."""
        if disk.source is not None and self._store.cached(digest) is None:
            await self._images.restore(disk.source, digest, asker)

    # --- in a disk thread ------------------------------------------------------------------
    def _ensure_many(
        self, record: VmRecord, wanted: tuple[DiskRequest, ...], images: dict[str, ImageInfo | None]
    ) -> dict[str, EnsuredDisk]:
        """Make missing disks; return disks by volume, without those whose image is missing."""
        made = {}
        for disk in wanted:
            if (raw := self._raw(record, disk.ref)) is not None:
                made[disk.volume] = raw
                continue
            files, place = self._place(record, disk)
            found = files.read(*place)
            if found is not None and other_medium(disk, found, self._store.may_be):
                found = None
            image = images.get(disk.volume)
            origin = record.origin if found is None else None
            begun = begun_with(self._files.root, origin, disk)
            ready = begun is not None or image is not None or disk.source is None
            missing = found is None and ready
            if missing:
                self._make(record, disk, image, begun)
                found = files.read(*place)
            if found is not None:
                files.renew_note(*place)
                layers, lowest = self._layers.chain(found)
                digest = base_of(self._store, disk, lowest)
                if disk.ref is not None and not missing:
                    self._note(record, disk.ref, digest)
                if found.virtual_size_bytes < (disk.size_bytes or 0):
                    found = self._grown(files, place, disk, found)
                file = made_disk(found, digest, lowest.backing_format, layers)
                made[disk.volume] = EnsuredDisk(file, digest, missing)
        return made

    def _raw(self, record: VmRecord, ref: VolumeRef | None) -> EnsuredDisk | None:
        """Return the disk of a volume that is no qcow2 file; None for any other disk.

        If the file of a shared volume is missing, this method makes the file.
        """
        if ref is not None and (there := self.pools.elsewhere(ref)) is not None:
            return EnsuredDisk(there, "", made=False)
        if ref is None or not ref.shared:
            return None
        files = self.pools.of(ref)
        size_bytes = files.shared_bytes(ref.folder)
        missing = size_bytes is None
        if missing:
            self.refuse_released(ref)
            self.pools.check_room(ref, ref.size_bytes)
        self._note(record, ref, "")
        if size_bytes is None:
            size_bytes = files.make_shared(ref.folder, ref.size_bytes)
        return EnsuredDisk(MadeDisk(virtual_size_bytes=size_bytes), "", missing)

    def _grown(
        self, files: DiskFolders, place: tuple[str, str], disk: DiskRequest, found: Overlay
    ) -> Overlay:
        size_bytes, ref = disk.size_bytes or 0, disk.ref
        self.pools.check_room(ref, size_bytes - found.virtual_size_bytes)
        files.grow(*place, size_bytes)
        self.pools.forget(ref)
        return files.read(*place) or found

    def _place(self, record: VmRecord, disk: DiskRequest) -> tuple[DiskFolders, tuple[str, str]]:
        if disk.ref is not None:
            return self.pools.of(disk.ref), (disk.ref.folder, DISK)
        return self._files, (record.uid, disk.volume)

    def _note(self, record: VmRecord, ref: VolumeRef, digest: str) -> None:
        uid, epoch = record.uid, record.epoch
        self.pools.of(ref).note(VolumeNote(ref=ref, holder=uid, epoch=epoch, digest=digest))

    def _make(
        self,
        record: VmRecord,
        disk: DiskRequest,
        image: ImageInfo | None,
        begun: Overlay | None = None,
    ) -> None:
        if disk.ref is not None:
            self.refuse_released(disk.ref)
            refuse_unfilled(disk.ref)
            self.pools.check_room(disk.ref, disk.size_bytes or 0)
        if begun is not None:
            size = max(begun.virtual_size_bytes, disk.size_bytes or 0)
            made = replace(begun, virtual_size_bytes=size)
        elif image is None:
            made = Overlay(disk.size_bytes or 0)
        else:
            size = overlay_size(disk, image.virtual_size_bytes)
            made = Overlay(size, str(self._store.path(image.digest)), image.format)
        layout = overlay.build(
            made.virtual_size_bytes,
            made.backing_path,
            ImageFormat(made.backing_format) if made.backing_path else None,
        )
        if disk.ref is not None:  # before the data, so that the data has an owner
            self._note(record, disk.ref, image.digest if image is not None else "")
        files, (folder, name) = self._place(record, disk)
        (files.replace if disk.drive else files.make)(folder, name, layout, made)

    # --- release -----------------------------------------------------------------------------
    async def release(self, uid: str, epoch: int, keep: QuarantineRequest | None = None) -> Gone:
        """Remove all disks of a VM, or move them to the quarantine if `keep` is given.

        Afterwards only a higher epoch may make disks of that uid again. A release with `ANY_EPOCH`
        does not restrict later epochs.

        Raises:
            VirtbusError: 409 `stale_epoch`: the VM has a newer assignment. 503 `store_error`.
        """
        async with self.locks.of(uid):
            if epoch < self._epochs.get(uid, 0):
                raise stale(epoch, self._epochs[uid])
            if epoch < ANY_EPOCH:
                self._released[uid] = max(epoch, self._released.get(uid, 0))
            if keep is None:
                return Gone(await self._threads.run(self._files.remove, uid))
            manifest = self._manifest(uid, epoch, keep)
            entry = await self._threads.run(self._quarantine.keep, uid, manifest)
            self.recount.set()
            return Gone(bool(entry), entry)

    async def release_volume(self, ref: VolumeRef, made_by: str = "") -> bool:
        """Remove the data of a volume; return False if nothing was removed.

        With `made_by` (an operation), data stays if another operation wrote it or a VM used it.

        Raises:
            VirtbusError: 409 `volume_in_use`: a VM of this node has it. 503 `store_error`.
        """
        if not ABILITIES[ref.kind].copies:
            return False  # its data belongs to the operator of the pool
        async with self.locks.of(ref.folder):
            if ref.kind in ON_DEVICES:
                if bool(made_by) and await self.devices.has_other(ref, made_by):
                    return False
                self._released[ref.folder] = 1
                return await self.devices.release(ref)
            folders = await self._threads.run(self.pools.of, ref)
            if bool(made_by) and await self._threads.run(folders.has_other, ref.folder, made_by):
                return False
            await self._threads.run(folders.refuse_used, ref.folder)
            self._released[ref.folder] = 1  # a VM that waits for an image must not make new data
            return await self._threads.run(folders.remove, ref.folder)

    def refuse_released(self, ref: VolumeRef) -> None:
        """Raise 409 `released` if the volume was removed since the start of imaged."""
        if self._released.get(ref.folder, 0):
            raise released(f"the volume {ref.name} was deleted; read the record again")

    async def held_volumes(self, after: str) -> HeldResources:
        return await self._threads.run(self.pools.page, after)

    # --- quarantine --------------------------------------------------------------------------
    def _manifest(self, uid: str, epoch: int, keep: QuarantineRequest) -> QuarantineManifest:
        return QuarantineManifest(uid=uid, epoch=epoch, keep=keep, since_ns=self._now_ns())

    async def quarantined(self) -> list[QuarantineEntry]:
        return await self._threads.run(self._quarantine.entries)

    async def kept(self, entry: str) -> tuple[QuarantineEntry, VmRecord | None]:
        """Return one entry, and the record that was saved with it; 404 `no_entry`."""
        manifest = await self._threads.run(self._quarantine.manifest, entry)
        record = manifest.keep.record if manifest is not None else None
        return await self._threads.run(self._quarantine.get, entry), record

    async def restore(self, entry: str, uid: str, keep: QuarantineRequest) -> None:
        """Move an entry's disks to a VM that does not run; 404 `no_entry`, 503 `store_error`.

        Existing disks of the VM go to the quarantine, in an entry that `keep` describes.
        """
        async with self.locks.of(uid):
            instead = self._manifest(uid, self._epochs.get(uid, 0), keep)
            await self._threads.run(self._quarantine.restore, entry, uid, instead)
            self.recount.set()

    async def purge(self, entry: str) -> None:
        """Remove an entry of the quarantine permanently; 404 `no_entry`, 503 `store_error`."""
        await self._threads.run(self._quarantine.purge, entry)
        self.recount.set()

    async def held(self, uid: str | None = None) -> dict[str, tuple[str, ...]]:
        return await self._threads.run(self._held, uid)

    def _held(self, uid: str | None) -> dict[str, tuple[str, ...]]:
        held: dict[str, tuple[str, ...]] = {}
        for found in self._files.find(uid):
            files = (found.file,) if found.file else ()
            held[found.uid] = held.get(found.uid, ()) + files
        return held

    async def expire_names(
        self, wanted: frozenset[str], keep: expiry.ExpiryLimits
    ) -> tuple[str, ...]:
        """Remove expired image names and return them. The `wanted` names stay."""
        for name in wanted:
            self._store.used(name)
        used = await self._threads.run(self.users.used)
        names = expired(self._store.uses(frozenset(used)), wanted, self._store.now_s(), keep)
        if names:
            await self._threads.run(self._store.remove_links, names)
        await self._threads.run(self._store.save_uses, keep.max_age_s)
        return names

    async def collect_garbage(self, grace_s: float) -> tuple[str, ...]:
        """Remove images without a name, disk, lease or recent use; return their digests."""
        used = await self._threads.run(self.users.used)
        digests = self._store.garbage(frozenset(used), grace_s)
        await self._threads.run(self._store.discard, digests)
        return digests

    async def forget_images(
        self, digests: frozenset[str], names: tuple[str, ...]
    ) -> tuple[int, tuple[str, ...]]:
        """Remove names and unused `digests`; return freed bytes, and uids that use `digests`."""
        sizes = {image.digest: image.size_bytes for image in self._store.images()}
        self._store.forget_names(names)
        used, began_ns = await self._threads.run(self.users.used_since)
        late = self._store.used_since(began_ns)  # by disks that were made meanwhile
        gone = self._store.garbage(late | used.keys(), 0.0, among=digests)
        await self._threads.run(self._store.discard, gone, names)
        users = {uid for digest in digests for uid in used.get(digest, ())}
        return sum(sizes[digest] for digest in gone), tuple(sorted(users))

    def _fence(self, record: VmRecord) -> None:
        uid, epoch = record.uid, record.epoch
        if epoch <= self._released.get(uid, 0):
            raise released(
                f"the disks of epoch {epoch} were released; a new assignment has a higher epoch"
            )
        if epoch < self._epochs.get(uid, 0):
            raise stale(epoch, self._epochs[uid])
        self._epochs[uid] = max(epoch, self._epochs.get(uid, 0))
