"""Runs imaged on one node: handles records and requests, and publishes imaged's state."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from virtbus.bus.client.ports import Bus, Endpoint, Gate, Request, ServiceInfo
from virtbus.bus.client.record_worker import RecordWorker
from virtbus.bus.client.service_report import report_state
from virtbus.bus.client.tracing import SpanFactory, no_span
from virtbus.bus.runtime import device_socket, process
from virtbus.bus.runtime.device_socket import ask_logical, open_device, refuse_used
from virtbus.bus.runtime.pool_settings import load_pools
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.imaged.backup_checks import BackupChecks
from virtbus.imaged.backups import BackupParts, Backups
from virtbus.imaged.core.expiry import ExpiryLimits
from virtbus.imaged.device_roots import DeviceRoots
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.disk_locks import DiskLocks
from virtbus.imaged.disk_step import DiskStep
from virtbus.imaged.disks import Disks
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.imaged.edge.backup_files import BackupFiles
from virtbus.imaged.edge.backup_staging import BackupStaging
from virtbus.imaged.edge.containers import Containers, Registries
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download import Downloads
from virtbus.imaged.edge.download_server import DownloadServer
from virtbus.imaged.edge.eviction import Eviction
from virtbus.imaged.edge.export_files import ExportFiles
from virtbus.imaged.edge.local_files import LocalFiles
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.edge.snapshot_files import SnapshotFolders
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.uploaded_names import uploaded_names
from virtbus.imaged.exports import ExportParts, Exports
from virtbus.imaged.fill_waits import FillWaits
from virtbus.imaged.fills import FillParts, Fills
from virtbus.imaged.flattening import Flattening, FlattenParts
from virtbus.imaged.images import Images
from virtbus.imaged.layer_sweep import LayerSweep
from virtbus.imaged.pool_probes import PoolProbes
from virtbus.imaged.reading_scratch import ReadingScratch
from virtbus.imaged.reporter import DiskReporter
from virtbus.imaged.requests import Requests, Transfers
from virtbus.imaged.settings import Settings
from virtbus.imaged.snapshot_parts import SnapshotParts
from virtbus.imaged.snapshots import Snapshots
from virtbus.imaged.uploads import Uploads
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import ImageReady, ServiceReport
from virtbus.schemas.pool import LOCAL
from virtbus.schemas.version import VERSION

log = logging.getLogger(__name__)

VERBS = dict.fromkeys(("ensure", "release", "inspect", "quarantine", "delete", "list"), 64)
VERBS |= dict.fromkeys(
    ("volume-release", "export", "fill", "snapshot", "snapshot-release", "flatten"), 64
)
VERBS |= dict.fromkeys(("backup", "backup-verify", "scratch"), 64)
VERBS["backups"] = 8
VERBS["layers"] = 1
VERBS["export-link"] = 16
VERBS["pull"] = 1024
"""The verbs, each with the number of requests handled at once. A pull request only waits for a
transfer. A controller sends at most 256 pull requests at once, shared among accounts."""
VERBS["upload"] = 16
WAITING = {"upload": 48}
"""Maximum number of requests that wait for a slot. Only verbs with large requests have an entry."""
CROWDED = 1.1
"""If there are more than CROWDED times `max_names` (setting) image names, names are removed at once
and not only after GC_INTERVAL_S."""
GC_INTERVAL_S = 3600.0
GC_GRACE_S = 3600.0
"""Time that an image without names and disks is kept after its last use."""


class Imaged:
    """The service on one node."""

    def __init__(
        self, bus: Bus, settings: Settings, span: SpanFactory = no_span, gate: Gate | None = None
    ) -> None:
        self._bus = bus
        self._gate = gate
        self._settings = settings
        self._span = span
        self._threads = DiskThreads()
        self._backup_threads = DiskThreads()
        """Separate threads, because the backup directory may be on a server that hangs."""
        self._changed = asyncio.Event()
        self._crowded = asyncio.Event()
        """Set when there are more names than CROWDED allows."""
        self._store: ImageStore | None = None
        self._requests: Requests | None = None
        self._pools: PoolProbes | None = None
        self._quarantined = (0, 0)
        """Number of entries in quarantine, and their bytes."""

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            VirtbusError: 409 `store_in_use`: another imaged uses this state_dir.
        """
        info = ServiceInfo(
            "virtbus-imaged",
            VERSION,
            "images and disks of a node",
            {"node": self._settings.node},
        )
        try:
            async with asyncio.TaskGroup() as group, self._bus.serve(info, self._endpoints()):
                group.create_task(
                    report_state(self._bus, self._settings.node, self._changed, self._state)
                )
                store = await self._threads.run(self._open_store)
                files = DiskFolders(self._settings.state_dir / "disks")
                with contextlib.closing(store), contextlib.closing(files):
                    async with asyncio.TaskGroup() as work:  # ends before the store is closed
                        await self._work(work, store, files)
        finally:
            self._threads.close()
            self._backup_threads.close()

    async def _work(self, group: asyncio.TaskGroup, store: ImageStore, files: DiskFolders) -> None:
        threads, limits = self._threads, self._settings.limits
        downloads = Downloads(limits, threads)
        names = self._names()
        images = Images(
            group,
            store=store,
            threads=threads,
            names=names,
            files=LocalFiles(self._settings.roots, limits, threads),
            http=downloads,
            containers=Containers(store, threads, downloads, limits, self._registries()),
            limits=limits,
            max_pulls=self._settings.max_pulls,
            changed=self._images_changed,
            span=self._span,
        )
        pools = self._measured_pools(group, files)
        now_ns, max_bytes = self._bus.sources.time_ns, limits.max_virtual_bytes
        disks = Disks(images, store, pools, threads, max_bytes, now_ns)
        reporter = DiskReporter(self._bus, self._settings.node)
        roots = DeviceRoots(images, store, pools, threads, limits, self._door)
        step = DiskStep(disks, FillWaits(pools, threads), reporter, roots)
        work = RecordWorker(group, step, reporter, self._span)

        def wanted() -> frozenset[str] | None:
            """Return the image references in all VMs' records, None before all are known."""
            return frozenset[str]().union(*step.refs.values()) if work.synced else None

        def pinned() -> Awaitable[frozenset[str]]:
            return threads.run(lambda: names.pinned(store.plain_names()) | uploaded_names(store))

        eviction = Eviction(store, disks.users, names, wanted, self._changed.set)
        store.space.make_room_by(eviction.make_room)
        await threads.run(names.read)  # logs the problems of the rules
        self._store = store
        transfers = await self._transfers(group, (disks, images, names), store, files, step.waits)
        self._requests = Requests(group, work, disks, images, transfers, reporter)
        group.create_task(self._count(disks))
        self._changed.set()
        process.notify("READY=1")
        log.info("ready: %d images", len(store.images()), extra={"code": "ready"})
        group.create_task(self._collect(disks, wanted, pinned))
        try:
            await self._follow(work)
        finally:
            images.stop()

    async def _follow(self, work: RecordWorker[ImageReady]) -> None:
        node = self._settings.node
        async with self._bus.node_watch(node, "imaged", self._gate) as watch:
            await work.follow(watch, node)

    def _names(self) -> AliasFiles:
        settings, cluster = self._settings, self._settings.run_dir / "image-names"
        return AliasFiles(settings.names_dir, settings.names, settings.roots, cluster)

    @property
    def _door(self) -> Path:
        return self._settings.run_dir / device_socket.NAME

    def _measured_pools(self, group: asyncio.TaskGroup, files: DiskFolders) -> Pools:
        settings = self._settings
        door = partial(open_device, self._door)
        logical = partial(ask_logical, self._door)
        pools = Pools(files, load_pools(settings.pools_file), settings.space, door, logical)
        pools.devices.refuse_used = partial(refuse_used, self._door)
        self._pools = PoolProbes(pools, self._changed.set)
        group.create_task(self._pools.run())
        return pools

    def _uploads(
        self, group: asyncio.TaskGroup, store: ImageStore, names: AliasFiles, images: Images
    ) -> Uploads:
        return Uploads(
            group,
            store=store,
            threads=self._threads,
            names=names,
            images=images,
            limits=self._settings.limits,
            uploads=self._settings.uploads,
            changed=self._images_changed,
        )

    async def _transfers(
        self,
        group: asyncio.TaskGroup,
        parts: tuple[Disks, Images, AliasFiles],
        store: ImageStore,
        files: DiskFolders,
        waits: FillWaits,
    ) -> Transfers:
        """Return the parts for long work.

        Start their tasks, and continue interrupted snapshots and restores.
        """
        disks, images, names = parts
        threads, limits, locks = self._threads, self._settings.limits, disks.locks
        jobs, places = DiskJobs(group), DiskPlaces(disks.pools, store)
        space = DiskSpace(files.root, disks.pools.space_of(LOCAL))
        exported = ExportFiles(files.root, space)
        served, sources = self._settings.downloads, self._bus.sources
        of_exports = ExportParts(
            *(locks, places, exported, threads, limits, disks.devices, served, sources)
        )
        exports = Exports(jobs, of_exports)
        group.create_task(exports.expire_forever())
        if served is not None:
            group.create_task(DownloadServer(exported, threads, served, sources.time_ns).run())
        frozen = SnapshotFolders(files.root)
        of_backups = self._backup_parts(locks, places, space)
        of_directory = DiskJobs(group)  # own slots: the backup directory's server may hang
        backups = Backups(of_directory, of_backups)
        checks = BackupChecks(of_directory, of_backups)
        group.create_task(backups.expire_forever())
        of_fills = FillParts(disks, images, store, places, disks.pools, threads, limits, checks)
        fills = Fills(jobs, of_fills, waits.tell)
        snapshots = Snapshots(jobs, SnapshotParts(locks, places, frozen, space, threads))
        await snapshots.recover()
        uploads = self._uploads(group, store, names, images)
        sweep = LayerSweep(frozen, disks.users.found, threads)
        scratch = ReadingScratch(of_backups.staging, space, threads)
        flattening = Flattening(jobs, FlattenParts(locks, places, space, threads, limits))
        return Transfers(
            *(uploads, exports, fills, snapshots, backups, checks, scratch, flattening),
            *(sweep, waits),
        )

    def _backup_parts(self, locks: DiskLocks, places: DiskPlaces, staged: DiskSpace) -> BackupParts:
        settings, files, stored = self._settings, None, None
        staging = BackupStaging(settings.state_dir / "disks")
        if settings.backup_dir is not None:
            files = BackupFiles(settings.state_dir / "disks", settings.backup_dir)
            stored = DiskSpace(settings.backup_dir, settings.space)
        sources, threads = self._bus.sources, self._backup_threads
        return BackupParts(
            *(locks, places, files, staging, staged, stored, threads, settings.limits, sources)
        )

    def _registries(self) -> Registries:
        return Registries(
            insecure=frozenset(name.lower() for name in self._settings.insecure_registries),
            auth_file=self._settings.registry_auth_file,
            realms=tuple(self._settings.registry_realms.items()),
            mirrors=tuple(
                (name.lower(), mirror.lower())
                for name, mirror in self._settings.registry_mirrors.items()
            ),
        )

    def _open_store(self) -> ImageStore:
        return ImageStore(self._settings.state_dir / "images", self._settings.space)

    # --- requests --------------------------------------------------------------------------
    def _endpoints(self) -> list[Endpoint]:
        node = self._settings.node
        return [
            Endpoint(
                verb,
                subjects.rpc(node, "imaged", verb),
                self._handler(verb),
                limit=limit,
                backlog=WAITING.get(verb, 1024),
            )
            for verb, limit in VERBS.items()
        ]

    def _handler(self, verb: str) -> Any:
        async def handle(request: Request) -> Any:
            if self._requests is None:
                raise VirtbusError(
                    Code.UNAVAILABLE,
                    "recovering",
                    "imaged is reading its store; ask again",
                    after_ms=500,
                )
            return await getattr(self._requests, verb.replace("-", "_"))(request)

        return handle

    # --- reports -----------------------------------------------------------------------------
    async def _state(self) -> ServiceReport:
        store = self._store
        state = NodeState.RECOVERING if store is None else NodeState.READY
        return ServiceReport(
            service="imaged",
            state=ServiceState(state=state, version=VERSION, seen_ns=self._bus.sources.time_ns()),
            image_keys=store.keys() if store is not None else (),
            image_bytes=await self._image_bytes(store) if store is not None else 0,
            image_quota_bytes=self._settings.quota_bytes,
            pools=self._pools.reports if self._pools is not None else (),
            quarantined=self._quarantined[0],
            quarantined_bytes=self._quarantined[1],
        )

    async def _image_bytes(self, store: ImageStore) -> int:
        try:
            return await self._threads.run(store.space.used_bytes)
        except OSError as error:
            log.warning("cannot measure the images: %s", error, extra={"code": "store_error"})
            return 0

    async def _count(self, disks: Disks) -> None:
        while True:
            await disks.recount.wait()
            disks.recount.clear()
            try:
                entries = await disks.quarantined()
            except (OSError, VirtbusError) as error:
                log.warning("cannot count the quarantine: %s", error, extra={"code": "store_error"})
                continue
            self._quarantined = len(entries), sum(entry.bytes for entry in entries)
            self._changed.set()

    def _images_changed(self) -> None:
        self._changed.set()
        if self._store is not None and self._store.names > self._settings.max_names * CROWDED:
            self._crowded.set()

    async def _expire_names(self, disks: Disks, wanted: frozenset[str]) -> None:
        keep = ExpiryLimits(self._settings.name_max_age_s, self._settings.max_names)
        names = await disks.expire_names(wanted, keep)
        if names:
            log.info("%d image names expired", len(names), extra={"code": "names_expired"})
            self._changed.set()

    async def _collect(
        self,
        disks: Disks,
        wanted: Callable[[], frozenset[str] | None],
        pinned: Callable[[], Awaitable[frozenset[str]]],
    ) -> None:
        while True:
            await wait_for_event(self._crowded, GC_INTERVAL_S)
            self._crowded.clear()
            try:
                refs = wanted()
                if refs is not None:
                    await self._expire_names(disks, refs | await pinned())
                digests = await disks.collect_garbage(GC_GRACE_S)
                if self._store is not None:
                    await self._threads.run(self._store.space.drop_old_uploads)
            except (OSError, VirtbusError) as error:
                log.warning("garbage collection failed: %s", error, extra={"code": "gc_failed"})
                continue
            for digest in digests:
                log.info("image %s removed: unused", digest, extra={"code": "image_removed"})
            if digests:
                self._changed.set()
