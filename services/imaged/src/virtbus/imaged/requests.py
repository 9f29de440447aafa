"""Handles `rpc.imaged.<verb>`: requests of the node's services and of controllers."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass

from virtbus.bus.client.ports import Request
from virtbus.bus.client.record_worker import RecordWorker
from virtbus.imaged.backup_checks import BackupChecks
from virtbus.imaged.backups import Backups
from virtbus.imaged.core.links import shown_name
from virtbus.imaged.disks import Disks
from virtbus.imaged.exports import Exports
from virtbus.imaged.fill_waits import FillWaits
from virtbus.imaged.fills import Fills
from virtbus.imaged.flattening import Flattening
from virtbus.imaged.images import Images
from virtbus.imaged.layer_sweep import LayerSweep
from virtbus.imaged.reading_scratch import ReadingScratch
from virtbus.imaged.reporter import DiskReporter
from virtbus.imaged.single_flight import Asker
from virtbus.imaged.snapshots import Snapshots
from virtbus.imaged.uploads import Uploads
from virtbus.schemas.backup import BackupsAsk, BackupWork, HeldBackups, ScratchWork, VerifyWork
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.export_link import ExportLink, ExportLinkAsk
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.image import ImageInfo, ImageSource, parse_image_ref, sealed_ref
from virtbus.schemas.image_upload import UploadedImage, UploadImage
from virtbus.schemas.layer import LayersAsk, UnneededLayers
from virtbus.schemas.node_rpc import (
    Ensure,
    ExportWork,
    FillWork,
    ForgetImage,
    ForgottenImage,
    HeldImages,
    HeldResources,
    ImageReady,
    Inspect,
    ListImages,
    PullImage,
    Release,
    ReleaseReply,
    VolumeRelease,
    VolumeReleased,
    WorkState,
)
from virtbus.schemas.quarantine import LIST_MAX, Quarantine, QuarantineRequest, QuarantineWork
from virtbus.schemas.snapshot_rpc import SnapshotRelease, SnapshotReleased, SnapshotWork
from virtbus.schemas.wire import invalid, valid_uid, validate

log = logging.getLogger(__name__)

ANSWER_BEFORE_S = 0.2
"""An answer is sent this long before the deadline, so that it arrives in time."""
WAITS_S = 20.0
"""Longest time that a request waits for a transfer. Then the client repeats the request. Without
this limit, slow transfers could occupy all request slots for an hour (ADR 0028)."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """The parts of imaged that do long work on the node's disk."""

    uploads: Uploads
    exports: Exports
    fills: Fills
    snapshots: Snapshots
    backups: Backups
    checks: BackupChecks
    scratch: ReadingScratch
    flattening: Flattening
    layers: LayerSweep
    waits: FillWaits


class Requests:
    """The handlers of all verbs.

    Each request may be repeated. A request for long work returns a `WorkState`, and does not wait
    for the end of the work.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        work: RecordWorker[ImageReady],
        disks: Disks,
        images: Images,
        transfers: Transfers,
        reporter: DiskReporter,
    ) -> None:
        self._group = group
        self._work = work
        self._disks = disks
        self._images = images
        self._transfers = transfers
        self._reporter = reporter
        self._pulling: dict[str, asyncio.Task[ImageInfo | VirtbusError]] = {}

    async def ensure(self, request: Request) -> ImageReady:
        """Make a VM's disks and return them.

        Raises:
            VirtbusError: 503 `image_pulling`, `volume_not_filled`: the disks are not ready in time.
                The errors of `DiskStep.ensure`.
        """
        want = validate(Ensure, request.data)
        try:
            async with asyncio.timeout(_left_s(request)):
                return await self._work.ensure(want.record, want.image_pull)
        except TimeoutError:
            self._transfers.waits.refuse_waiting(want.record.uid)
            raise VirtbusError(
                Code.UNAVAILABLE,
                "image_pulling",
                "the image is still being fetched; ask again, or wait for the ready event",
                after_ms=1000,
            ) from None

    async def release(self, request: Request) -> ReleaseReply:
        """Remove a VM's disks, or move them to the quarantine. No error if there are none."""
        want = validate(Release, request.data)
        uid = self._work.end(want)
        gone = await self._disks.release(uid, want.epoch, want.keep)
        if gone.kept and want.keep is not None:
            extra = {"code": "disks_kept", "uid": uid}
            log.warning("disks in quarantine as %s: %s", gone.kept, want.keep.why, extra=extra)
        elif gone.found:
            log.info("disks removed", extra={"code": "disks_released", "uid": uid})
            self._reporter.released(uid, want.epoch)
        return ReleaseReply(uid=uid, kept=gone.kept)

    async def volume_release(self, request: Request) -> VolumeReleased:
        """Remove the data of a volume. No error if there is none.

        If `kept` is given, the data is removed only if this node has the complete content of the
        volume `kept`.
        """
        want = validate(VolumeRelease, request.data)
        ref, kept = want.ref, want.kept
        if kept is not None and not await self._transfers.waits.has_content(kept):
            return VolumeReleased()
        found = await self._disks.release_volume(ref, want.made_by or "")
        if found:
            log.info("volume removed", extra={"code": "volume_released", "uid": ref.uid})
        return VolumeReleased(found=found)

    async def export(self, request: Request) -> WorkState:
        return await self._transfers.exports.do(validate(ExportWork, request.data))

    async def flatten(self, request: Request) -> WorkState:
        return await self._transfers.flattening.do(validate(FlattenWork, request.data))

    async def export_link(self, request: Request) -> ExportLink:
        return await self._transfers.exports.link(validate(ExportLinkAsk, request.data))

    async def fill(self, request: Request) -> WorkState:
        return await self._transfers.fills.do(validate(FillWork, request.data))

    async def backup(self, request: Request) -> WorkState:
        return await self._transfers.backups.do(validate(BackupWork, request.data))

    async def scratch(self, request: Request) -> WorkState:
        return await self._transfers.scratch.do(validate(ScratchWork, request.data))

    async def backup_verify(self, request: Request) -> WorkState:
        return await self._transfers.checks.verify(validate(VerifyWork, request.data))

    async def backups(self, request: Request) -> HeldBackups:
        return await self._transfers.backups.held(validate(BackupsAsk, request.data))

    async def snapshot(self, request: Request) -> WorkState:
        """Begin, continue or cancel a snapshot or a restore; wait briefly for the end of a step."""
        return await self._transfers.snapshots.do(validate(SnapshotWork, request.data))

    async def layers(self, request: Request) -> UnneededLayers:
        validate(LayersAsk, request.data)
        return await self._transfers.layers.unneeded()

    async def snapshot_release(self, request: Request) -> SnapshotReleased:
        """Remove the data of a snapshot. No error if there is none."""
        ref = validate(SnapshotRelease, request.data).ref
        found = await self._transfers.snapshots.release(ref)
        if found:
            log.info("snapshot removed", extra={"code": "snapshot_released", "uid": ref.uid})
        return SnapshotReleased(found=found)

    async def quarantine(self, request: Request) -> Quarantine:
        """List, get, restore or purge entries of the quarantine."""
        want = validate(QuarantineWork, request.data)
        if want.do == "list":
            entries = await self._disks.quarantined()
            return Quarantine(entries=tuple(entries[:LIST_MAX]), total=len(entries))
        entry = want.entry or ""
        kept, record = await self._disks.kept(entry)
        if want.do == "restore":
            uid = valid_uid(want.uid or kept.uid)
            keep = want.keep or QuarantineRequest(why=f"{entry} was adopted")
            self._work.drop(uid)
            await self._disks.restore(entry, uid, keep)
        elif want.do == "purge":
            await self._disks.purge(entry)
        if want.do != "get":
            extra = {"code": "quarantine", "uid": kept.uid}
            log.warning("%s of %s (%s)", want.do, entry, kept.name, extra=extra)
        return Quarantine(entries=(kept,), total=1, record=record)

    async def inspect(self, request: Request) -> HeldResources:
        want = validate(Inspect, request.data)
        if want.volumes_after is not None:
            return await self._disks.held_volumes(want.volumes_after)
        if want.snapshots_after is not None:
            return await self._transfers.snapshots.held(want.snapshots_after)
        return HeldResources(
            things=await self._disks.held(valid_uid(want.uid) if want.uid else None)
        )

    async def list(self, request: Request) -> HeldImages:
        return self._images.page(validate(ListImages, request.data).after)

    async def pull(self, request: Request) -> ImageInfo:
        """Fetch the current image of a reference. The transfer continues after the answer.

        Raises:
            VirtbusError: 504 `image_pulling` after WAITS_S, or shortly before the deadline. The
                errors of `Images.refresh`.
        """
        want = validate(PullImage, request.data)
        try:
            ref, query = sealed_ref(want.ref)
            source = parse_image_ref(ref)._replace(target=want.target)
        except ValueError as error:
            raise invalid((Detail(path="ref", message=str(error)),)) from None
        secret = want.pull_secret if source.is_container else query
        login = hashlib.sha256(secret.encode()).hexdigest()
        key = f"{want.ref}\n{source.name}\n{login}"
        task = self._pulling.get(key)
        if task is None:
            job = valid_uid(want.job)
            asker = Asker(self._reporter.progress(job), job, pull_secret=secret)
            task = self._group.create_task(self._pull(key, source, asker))
            self._pulling[key] = task
        await asyncio.wait({task}, timeout=_left_s(request))
        if not task.done():
            raise VirtbusError(
                Code.DEADLINE,
                "image_pulling",
                "the image is still being fetched; repeat the request to wait longer",
                after_ms=100,
            )
        outcome = task.result()
        if isinstance(outcome, VirtbusError):
            raise outcome
        return outcome

    async def upload(self, request: Request) -> UploadedImage:
        want = validate(UploadImage, request.data)
        return await self._transfers.uploads.take(want, request.account, _left_s(request))

    async def delete(self, request: Request) -> ForgottenImage:
        """Remove an image's names, and its bytes if no disk uses the image."""
        want = validate(ForgetImage, request.data)
        forget = self._disks.forget_images
        freed_bytes, used_by, names = await self._images.forget(want.ref, forget)
        log.info(
            "image %s removed, %d bytes freed",
            shown_name(want.ref),
            freed_bytes,
            extra={"code": "image_removed"},
        )
        shown = tuple(sorted({shown_name(name) for name in names}))
        return ForgottenImage(names=shown, freed_bytes=freed_bytes, used_by=used_by)

    async def _pull(self, key: str, source: ImageSource, asker: Asker) -> ImageInfo | VirtbusError:
        try:
            return await self._images.refresh(source, asker)
        except VirtbusError as error:
            log.warning("%s", error, extra={"code": error.reason})
            return error
        except Exception:  # boundary: one pull's fault must not end the service
            log.exception("pulling an image failed", extra={"code": "internal"})
            return VirtbusError(Code.INTERNAL, "internal", "the pull failed; see imaged's log")
        finally:
            del self._pulling[key]


def _left_s(request: Request) -> float:
    left_s = request.deadline_s - ANSWER_BEFORE_S - asyncio.get_running_loop().time()
    return min(max(left_s, 0.0), WAITS_S)
