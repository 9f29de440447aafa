"""imaged and netd, simulated: the same subjects, the same rules, a dictionary for a host.

The rules are those of their `work.py` and `service.py`. A record that is not being deleted is
prepared. A released VM is removed. Only the agent decides when a VM is released.
"""

import asyncio
import hashlib
from contextlib import AsyncExitStack
from typing import Literal

from tests.sim.backup_hand import BackupHand
from tests.sim.bus import SimBus
from tests.sim.hostports import Threads
from tests.sim.loop import Process
from tests.sim.machine import Host
from tests.sim.node_rules import NodeRules

from virtbus.bus.client.ports import (
    Endpoint,
    Entry,
    EntryKind,
    Gate,
    Handler,
    Request,
    ServiceInfo,
    WatchMark,
)
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.image_upload import UploadedImage, UploadImage
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import (
    ANY_EPOCH,
    Ensure,
    ExportWork,
    FillWork,
    ForgetImage,
    ForgottenImage,
    HeldResources,
    HeldSnapshot,
    HeldVolume,
    ImageReady,
    Inspect,
    MadeDisk,
    NetPhase,
    NetReady,
    Release,
    ReleaseReply,
    ServiceReport,
    VolumeRelease,
    VolumeReleased,
    WorkState,
)
from virtbus.schemas.operation import ExportResult
from virtbus.schemas.quarantine import (
    Quarantine,
    QuarantineEntry,
    QuarantineRequest,
    QuarantineWork,
)
from virtbus.schemas.records import of_node_group, of_operation
from virtbus.schemas.snapshot_rpc import SnapshotRelease, SnapshotReleased, SnapshotWork
from virtbus.schemas.version import VERSION
from virtbus.schemas.vm import MIB, VmRecord
from virtbus.schemas.wire import read, validate

TELL_S = 4.0
RETRY_S = 2.0
RECOVERY_S = (0.05, 1.0)
EXPORTED = WorkState(
    state="done", result=ExportResult(path="/x", size_bytes=1, digest=f"sha256:{'1' * 64}")
)


class Hand:
    """One of the two services on one host."""

    def __init__(
        self, kind: Literal["imaged", "netd"], bus: SimBus, host: Host, process: Process, gate: Gate
    ) -> None:
        self._kind = kind
        self._bus = bus
        self._gate = gate
        self._host = host
        self._threads = Threads(host, process)
        self._jobs: dict[str, tuple[VmRecord, asyncio.Task[ImageReady | NetReady]]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._exports: dict[str, asyncio.Task[None]] = {}
        self._released_epochs: dict[str, int] = {}
        self._gone_volumes: set[str] = set()
        self._listed: set[str] = set()
        self._rules = NodeRules(host)
        self._backups = BackupHand(bus, host, self._threads, self._one)
        self._records: dict[str, VmRecord] = {}
        """By uid: the record that the watch has delivered."""
        self._listing = True
        self._found: dict[str, VmRecord] = {}
        self._group: asyncio.TaskGroup | None = None
        self.recovering = True

    async def run(self) -> None:
        """Serve until the process dies."""
        answers: dict[str, Handler] = {
            "quarantine": self._quarantine,
            "ensure": self._ensure,
            "inspect": self._inspect,
            "release": self._release,
        }
        if self._kind == "imaged":
            answers |= {
                "volume-release": self._volume_release,
                "export": self._export,
                "fill": self._fill,
                "snapshot": self._snapshot,
                "snapshot-release": self._snapshot_release,
                "upload": self._upload,
                "delete": self._forget_image,
            }
        async with asyncio.TaskGroup() as self._group:
            if self._kind == "imaged":
                answers |= self._backups.begin(self._group, self._ready)
            await self._serve(self._group, answers)

    async def _serve(self, group: asyncio.TaskGroup, answers: dict[str, Handler]) -> None:
        endpoints = [
            Endpoint(verb, subjects.rpc(self._host.node, self._kind, verb), answer)
            for verb, answer in answers.items()
        ]
        info = ServiceInfo(f"virtbus-{self._kind}", VERSION, "simulated", {})
        async with self._bus.serve(info, endpoints):
            group.create_task(self._tell())
            await asyncio.sleep(self._host.rng.uniform(*RECOVERY_S))
            self.recovering = False
            async with self._bus.node_watch(self._host.node, self._kind, self._gate) as watch:
                async for item in watch:
                    await self._follow(item)

    async def _follow(self, item: Entry | WatchMark) -> None:
        """Process an item of the watch. Work for a list begins when the list is complete."""
        if item is WatchMark.RESET:
            self._listing = True
            self._listed.clear()
            self._found.clear()
        if self._kind == "netd" and self._rules.see(item):
            await self._threads.on_disk(self._rules.apply)
        if isinstance(item, Entry):
            self._see(item)
        elif item is WatchMark.SYNCED:
            self._listing, found = False, list(self._found.values())
            self._found.clear()
            for record in found:
                self._want(record)

    def _see(self, entry: Entry) -> None:
        uid = entry.key.rpartition(".")[2]
        if of_operation(entry.key) or of_node_group(entry.key):
            return
        if uid.startswith("_"):  # the join nonce, the node's desired state
            return
        record = read(VmRecord, entry.value) if entry.kind is EntryKind.PUT else None
        self._listed.discard(uid)
        self._found.pop(uid, None)
        if record is None or record.ending:
            self._records.pop(uid, None)
            self._drop(uid)
            return
        self._listed.add(uid)
        self._records[uid] = record
        if self._listing:
            self._found[uid] = record
        else:
            self._want(record)

    async def _tell(self) -> None:
        state = NodeState.RECOVERING if self.recovering else NodeState.READY
        while True:
            kept = len(self._host.disk.quarantine) if self._kind == "imaged" else 0
            service_report = ServiceReport(
                service=self._kind,
                state=ServiceState(state=state),
                quarantined=kept,
                quarantined_bytes=kept,
            )
            await self._bus.publish(
                subjects.service_report(self._host.node, self._kind), service_report
            )
            await asyncio.sleep(TELL_S if not self.recovering else 0.5)
            state = NodeState.RECOVERING if self.recovering else NodeState.READY

    # --- work -----------------------------------------------------------------------------
    def _want(self, record: VmRecord) -> "asyncio.Task[ImageReady | NetReady]":
        job = self._jobs.get(record.uid)
        if job is not None:
            record = record if _age(record) >= _age(job[0]) else job[0]
            if record == job[0] and not job[1].done():
                return job[1]
            job[1].cancel()
        assert self._group is not None
        task = self._group.create_task(self._make(record))
        self._jobs[record.uid] = (record, task)
        self._group.create_task(self._repeat(record, task))
        return task

    async def _repeat(self, record: VmRecord, task: "asyncio.Task[ImageReady | NetReady]") -> None:
        """Try again after a failure, as the services do while the VM has this record."""
        await asyncio.wait([task])
        error = None if task.cancelled() else task.result().error
        if error is None or error.retry is Retry.NEVER:
            return
        await asyncio.sleep(RETRY_S)
        if self._jobs.get(record.uid) == (record, task) and record.uid in self._listed:
            self._want(record)

    def _drop(self, uid: str) -> None:
        job = self._jobs.pop(uid, None)
        if job is not None:
            job[1].cancel()

    def _one(self, uid: str) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    async def _make(self, record: VmRecord) -> ImageReady | NetReady:
        temper, rng = self._host.temper, self._host.rng
        await asyncio.sleep(rng.uniform(*temper.part_s))
        if rng.random() < temper.part_fails:
            error = VirtbusError(Code.UNAVAILABLE, "source_down", "the source does not answer")
            ready = self._failed(record, error)
        else:
            while self._kind == "imaged" and not self._filled(record):
                await asyncio.sleep(1.0)
            refs = record.volume_refs.values() if self._kind == "imaged" else ()
            folders = sorted(ref.folder for ref in refs)
            async with self._one(record.uid), AsyncExitStack() as held:
                for folder in folders:
                    await held.enter_async_context(self._one(folder))
                ready = await self._threads.on_disk(lambda: self._made(record))
        part = "image" if self._kind == "imaged" else "net"
        await self._bus.publish(subjects.ready(self._host.node, record.uid, part), ready)
        return ready

    def _filled(self, record: VmRecord) -> bool:
        volumes, leaving = self._host.disk.volumes, record.detaching
        refs = [ref for name, ref in record.volume_refs.items() if name not in leaving]
        return all(ref.folder in volumes for ref in refs if ref.copied)

    def _made(self, record: VmRecord) -> ImageReady | NetReady:
        """On the host: the record's disks or network exist."""
        uid, epoch = record.uid, record.epoch
        if epoch <= self._released_epochs.get(uid, 0):
            error = VirtbusError(Code.CONFLICT, "released", f"{uid} was released")
            return self._failed(record, error)
        held = self._host.disk.overlays if self._kind == "imaged" else self._host.networks
        if self._host.full and uid not in held:
            error = VirtbusError(Code.UNAVAILABLE, "disk_full", "no space left; free some there")
            return self._failed(record, error)
        leaving = record.detaching
        refs = [ref for name, ref in record.volume_refs.items() if name not in leaving]
        gone = self._gone_volumes - self._host.disk.volumes.keys()
        if not gone.isdisjoint(ref.folder for ref in refs):
            error = VirtbusError(Code.CONFLICT, "released", "the volume was deleted")
            return self._failed(record, error)
        if self._kind == "imaged":
            self._host.disk.overlays[uid] = max(epoch, self._host.disk.overlays.get(uid, 0))
            for ref in refs:
                self._host.disk.volumes[ref.folder] = uid
                self._host.disk.filled.pop(ref.folder, None)
            disks = {
                volume.name: _made_of(record.image_of(volume))
                for volume in record.spec.volumes
                if not volume.is_iso
            }
            return ImageReady(uid=uid, epoch=epoch, generation=record.generation, disks=disks)
        known = self._host.networks.get(uid)
        claimed = [one for claims in record.address_claims.values() for one in claims.addresses]
        address = claimed[0] if claimed else known[1] if known else self._host.address()
        self._host.networks[uid] = (max(epoch, known[0] if known else 0), address)
        self._rules.attach(record)
        networks = {one.name: one.network for one in record.spec.networks}
        return NetReady(
            uid=uid,
            epoch=epoch,
            generation=record.generation,
            phase=NetPhase.READY,
            interfaces=tuple(
                InterfaceStatus(
                    name=nic.name,
                    mac="02:00:00:00:00:01",
                    addresses=(address,),
                    network=networks.get(nic.name, ""),
                )
                for nic in record.spec.domain.devices.interfaces
            ),
        )

    def _failed(self, record: VmRecord, error: VirtbusError) -> ImageReady | NetReady:
        if self._kind == "imaged":
            return ImageReady(uid=record.uid, epoch=record.epoch, error=error.body)
        return NetReady(uid=record.uid, epoch=record.epoch, phase=NetPhase.FAILED, error=error.body)

    # --- requests -------------------------------------------------------------------------
    def _ready(self) -> None:
        if self.recovering:
            message = f"{self._kind} compares host and records; ask again in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message, after_ms=500)

    async def _ensure(self, request: Request) -> ImageReady | NetReady:
        self._ready()
        record = validate(Ensure, request.data).record
        if self._kind == "netd":
            record = self._newest(record)
        ready = await asyncio.shield(self._want(record))
        if ready.error is not None:
            raise VirtbusError.of(ready.error)
        return ready

    def _newest(self, asked: VmRecord) -> VmRecord:
        """Return the record from the bus; the groups that it needs came before it."""
        found = self._records.get(asked.uid)
        if self._listing or found is None or _age(found) < _age(asked):
            raise VirtbusError(Code.UNAVAILABLE, "record_late", "the record has not arrived here")
        return found

    async def _inspect(self, request: Request) -> HeldResources:
        self._ready()
        want = validate(Inspect, request.data)
        if want.snapshots_after is not None:
            found = self._host.disk.snapshots
            later = sorted(one for one in found if one > want.snapshots_after)
            return HeldResources(snapshots=tuple(_held(found[one]) for one in later))
        after = want.volumes_after
        if after is not None:
            folders = sorted(one for one in self._host.disk.volumes if one > after)
            return HeldResources(volumes=tuple(HeldVolume(folder=one) for one in folders))
        held = self._host.disk.overlays if self._kind == "imaged" else self._host.networks
        return HeldResources(things=dict.fromkeys(sorted(held), (self._kind,)))

    async def _release(self, request: Request) -> ReleaseReply:
        self._ready()
        want = validate(Release, request.data)
        if want.epoch >= ANY_EPOCH and want.uid in self._listed:
            raise VirtbusError(Code.CONFLICT, "record_stands", want.uid)
        self._drop(want.uid)
        async with self._one(want.uid):
            kept = await self._threads.on_disk(lambda: self._released(want))
        return ReleaseReply(uid=want.uid, kept=kept)

    async def _volume_release(self, request: Request) -> VolumeReleased:
        self._ready()
        want = validate(VolumeRelease, request.data)
        folder, by = want.ref.folder, self._host.disk.filled.get(want.ref.folder)
        if want.made_by and folder in self._host.disk.volumes and by != want.made_by:
            return VolumeReleased()
        return await self._threads.on_disk(lambda: self._volume_gone(folder))

    def _volume_gone(self, folder: str) -> VolumeReleased:
        """On the host: the data of a volume is removed."""
        self._gone_volumes.add(folder)
        if folder not in self._host.disk.volumes:
            return VolumeReleased()
        self._host.watcher.volume_removed(self._host, folder)
        del self._host.disk.volumes[folder]
        return VolumeReleased(found=True)

    async def _export(self, request: Request) -> WorkState:
        self._ready()
        want, disk = validate(ExportWork, request.data), self._host.disk
        if want.do != "ensure":
            if (task := self._exports.pop(want.id, None)) is not None:
                task.cancel()
            if want.do == "cancel" and want.id in disk.exports:
                return EXPORTED
            disk.exports.pop(want.id, None)
            return WorkState(state="none")
        if want.id in disk.exports:
            return EXPORTED
        task = self._exports.get(want.id)
        if task is not None and task.done():
            del self._exports[want.id]
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", "the source has no content")
        if task is None:
            assert self._group is not None
            self._exports[want.id] = self._group.create_task(self._exporting(want))
        return WorkState(state="working", step="convert")

    async def _exporting(self, want: ExportWork) -> None:
        """Export, unless it is a volume without data: its VM may never have started."""
        async with self._one(want.uid):
            await asyncio.sleep(self._host.rng.uniform(0.1, 15.0))
            if want.ref is None or want.ref.folder in self._host.disk.volumes:
                self._host.disk.exports[want.id] = want.uid

    async def _fill(self, request: Request) -> WorkState:
        self._ready()
        want, volumes = validate(FillWork, request.data), self._host.disk.volumes
        if want.do == "cancel" and (task := self._exports.pop(want.id, None)) is not None:
            task.cancel()
        if want.ref.folder in volumes:
            if want.source.moved and self._host.disk.filled.get(want.ref.folder) != want.id:
                if want.do == "cancel":
                    return WorkState(state="none")
                raise VirtbusError(Code.CONFLICT, "volume_exists", "data of an earlier time")
            return WorkState(state="done", virtual_size_bytes=64 * MIB)
        if want.do == "cancel":
            return WorkState(state="none")
        task = self._exports.get(want.id)
        if task is not None and task.done():
            del self._exports[want.id]
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", "the source has no content")
        if task is None:
            assert self._group is not None
            self._exports[want.id] = self._group.create_task(self._filling(want))
        return WorkState(state="working", step="copy")

    async def _filling(self, want: FillWork) -> None:
        """Copy, unless the source is missing or the volume was deleted."""
        source, disk = want.source, self._host.disk
        async with self._one(source.vm or want.ref.uid):
            await asyncio.sleep(self._host.rng.uniform(0.1, 15.0))
            there = bool(source.image) or source.vm in disk.overlays
            if source.moved:
                there = source.image.partition("@")[0] in disk.uploads
            if source.volume is not None:
                there = source.volume.folder in disk.volumes
            if source.backup:
                there = self._backups.readable(source.backup)
            if there and (source.moved or want.ref.folder not in self._gone_volumes):
                self._host.watcher.volume_filled(self._host, want.ref.folder)
                self._host.disk.volumes[want.ref.folder] = ""
                self._host.disk.filled[want.ref.folder] = want.id

    async def _snapshot(self, request: Request) -> WorkState:
        """Make a snapshot of a volume, or put one in its place and keep what it replaces."""
        self._ready()
        want, made = validate(SnapshotWork, request.data), self._host.disk.snapshots
        if want.do == "cancel" and (task := self._exports.pop(want.id, None)) is not None:
            task.cancel()
        if want.snapshot.folder in made:
            return WorkState(state="done", done_bytes=1)
        if want.do == "cancel":
            return WorkState(state="none")
        task = self._exports.get(want.id)
        if task is not None and task.done():
            del self._exports[want.id]
            raise VirtbusError(Code.NOT_FOUND, "disk_missing", "a disk has no data")
        if task is None:
            if not want.may_begin:
                raise VirtbusError(Code.CONFLICT, "disk_in_use", "a guest may use the disk")
            assert self._group is not None
            self._exports[want.id] = self._group.create_task(self._freezing(want))
        return WorkState(state="working", step="copy")

    async def _freezing(self, want: SnapshotWork) -> None:
        """Copy, unless the data is missing."""
        disk, folders = self._host.disk, [one.ref.folder for one in want.disks if one.ref]
        async with AsyncExitStack() as held:
            for lock in sorted(folders):
                await held.enter_async_context(self._one(lock))
            await asyncio.sleep(self._host.rng.uniform(0.1, 15.0))
            restored = want.restored.folder if want.restored is not None else None
            if restored in {None, *disk.snapshots} and all(one in disk.volumes for one in folders):
                for folder in folders if restored else ():
                    self._host.watcher.volume_restored(self._host, folder)
                    disk.bitmaps.clear()  # the new disks have none; for others a full one is right
                disk.snapshots[want.snapshot.folder] = want

    async def _snapshot_release(self, request: Request) -> SnapshotReleased:
        self._ready()
        folder = validate(SnapshotRelease, request.data).ref.folder
        gone = await self._threads.on_disk(lambda: self._host.disk.snapshots.pop(folder, None))
        return SnapshotReleased(found=gone is not None)

    async def _upload(self, request: Request) -> UploadedImage:
        """Store a file of a move. The bytes are not simulated: the first answer says all are."""
        self._ready()
        want = validate(UploadImage, request.data)
        await asyncio.sleep(self._host.rng.uniform(0.1, 5.0))
        if want.at < want.size_bytes:
            return UploadedImage(offset_bytes=want.size_bytes)
        await self._threads.on_disk(lambda: self._host.disk.uploads.add(want.name))
        image = ImageInfo(
            digest=want.digest, format=ImageFormat.QCOW2, size_bytes=1, virtual_size_bytes=1
        )
        return UploadedImage(offset_bytes=want.size_bytes, image=image)

    async def _forget_image(self, request: Request) -> ForgottenImage:
        self._ready()
        ref, uploads = validate(ForgetImage, request.data).ref, self._host.disk.uploads
        if ref not in uploads:
            raise VirtbusError(Code.NOT_FOUND, "image_unknown", ref)
        await self._threads.on_disk(lambda: uploads.discard(ref))
        return ForgottenImage(names=(ref,))

    async def _quarantine(self, request: Request) -> Quarantine:
        self._ready()
        want = validate(QuarantineWork, request.data)
        return await self._threads.on_disk(lambda: self._quarantined(want))

    def _quarantined(self, want: QuarantineWork) -> Quarantine:
        disk = self._host.disk
        if want.do == "list":
            entries = tuple(_kept(*one) for one in sorted(disk.quarantine.items()))
            return Quarantine(entries=entries, total=len(entries))
        entry = want.entry or ""
        if entry not in disk.quarantine:
            raise VirtbusError(Code.NOT_FOUND, "no_entry", entry)
        keep = disk.quarantine[entry]
        if want.do == "restore":
            uid = want.uid or entry
            if uid in disk.overlays:
                self._gone(uid, want.keep)
            disk.overlays[uid] = 0
            disk.written.add(uid)
        if want.do != "get":
            del disk.quarantine[entry]
        return Quarantine(entries=(_kept(entry, keep),), total=1, record=keep.record)

    def _released(self, want: Release) -> str:
        """On the host: everything of the VM is removed, except kept disks."""
        if self._kind == "imaged":
            held = self._host.disk.overlays.get(want.uid, 0)
        else:
            held = self._host.networks.get(want.uid, (0, ""))[0]
        if held > want.epoch:
            message = f"{want.uid} is held for epoch {held}"
            raise VirtbusError(Code.CONFLICT, "stale_epoch", message)
        domain = self._host.domains.get(want.uid)
        if domain is not None and domain.active:
            self._host.watcher.wrong("I1", f"{want.uid}: {self._kind} lets go under a guest")
        if want.epoch < ANY_EPOCH:
            self._released_epochs[want.uid] = want.epoch
        if self._kind == "netd":
            self._host.networks.pop(want.uid, None)
            self._host.rules.pop(want.uid, None)
        elif want.uid in self._host.disk.overlays:
            return self._gone(want.uid, want.keep)
        elif want.keep is not None and want.uid in self._host.disk.quarantine:
            return want.uid
        return ""

    def _gone(self, uid: str, keep: QuarantineRequest | None) -> str:
        """Remove a VM's overlay from its place: delete it, or keep it if it has writes."""
        disk, entry, number = self._host.disk, uid, 2
        del disk.overlays[uid]
        disk.bitmaps.pop(uid, None)
        if uid not in disk.written:
            return ""
        disk.written.discard(uid)
        if keep is None:
            self._host.watcher.disk_removed(self._host, uid)
            return ""
        while entry in disk.quarantine:
            entry, number = f"{uid}.{number}", number + 1
        disk.quarantine[entry] = keep
        self._host.watcher.note(self._host.name, "kept", entry)
        return entry


def _held(made: SnapshotWork) -> HeldSnapshot:
    about = {"resource": made.resource, "uid": made.uid, "name": made.name}
    return HeldSnapshot(folder=made.snapshot.folder, ref=made.snapshot, **about)


def _age(record: VmRecord) -> tuple[int, int]:
    return record.epoch, record.generation


def _kept(entry: str, keep: QuarantineRequest) -> QuarantineEntry:
    kept, record = (
        QuarantineEntry(entry=entry, uid=entry.partition(".")[0], why=keep.why),
        keep.record,
    )
    if record is None:
        return kept
    of = {"name": record.name, "namespace": record.namespace, "adoptable": True}
    return kept.model_copy(update=of)


def _made_of(ref: str) -> MadeDisk:
    """Return a disk of the image `ref`, with the digest of its name."""
    digest = f"sha256:{hashlib.sha256(ref.encode()).hexdigest()}" if ref else ""
    image_format = ImageFormat.QCOW2 if ref else None
    return MadeDisk(virtual_size_bytes=1, digest=digest, image_format=image_format)
