"""Simulates imaged's image store, with names and digests but no bytes."""

import functools
import hashlib

from virtbus.schemas.backup import (
    BackupManifest,
    BackupsAsk,
    BackupWork,
    HeldBackup,
    HeldBackups,
)
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.image import ImageFormat, ImageInfo, ImageTarget, parse_image_ref
from virtbus.schemas.image_upload import UploadedImage, UploadImage
from virtbus.schemas.node_rpc import (
    ExportWork,
    FillWork,
    ForgottenImage,
    MadeDisk,
    VolumeRelease,
    VolumeReleased,
    WorkState,
)
from virtbus.schemas.operation import ExportResult
from virtbus.schemas.snapshot_rpc import SnapshotRelease, SnapshotReleased, SnapshotWork
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import invalid


class SimulatedImages:
    """A store that pulls any image at once, with size 0."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        """The digests of the images, by name or URL."""
        self._disks: dict[str, frozenset[str]] = {}
        """The digests of the images that a VM's disks use, by uid."""
        self._volumes: set[str] = set()
        """The folders of volumes."""
        self._snapshots: set[str] = set()
        """The folders of snapshots."""
        self._exports: dict[str, bool] = {}
        """True for a published export, False for one in progress, by operation."""
        self._backups: dict[str, BackupManifest | None] = {}
        """The manifests of backups by id; None while a backup is being made."""
        self._fills: set[str] = set()
        """The operations of fills that have begun."""

    def pull(self, ref: str, target: ImageTarget | None = None) -> ImageInfo:
        """Add an image and return it; raise VirtbusError 400 for an invalid reference."""
        return self._info(self._add(ref, target))

    def upload(self, want: UploadImage) -> UploadedImage:
        """Discard the bytes of a piece. The last piece adds the image under its name."""
        offset_bytes = want.at + len(want.data)
        if offset_bytes < want.size_bytes:
            return UploadedImage(offset_bytes=offset_bytes)
        self._digests[want.name] = want.digest
        return UploadedImage(offset_bytes=offset_bytes, image=self._info(want.digest))

    def _add(self, ref: str, target: ImageTarget | None) -> str:
        locator, digest = _parsed(ref)
        if target is not None:
            digest = target.digest or _parsed(target.url)[1]
        self._digests[locator] = digest
        return digest

    def list(self) -> tuple[ImageInfo, ...]:
        return tuple(self._info(digest) for digest in sorted(set(self._digests.values())))

    def make_disks(self, record: VmRecord) -> dict[str, MadeDisk]:
        """Add the images of a VM's disks; return the disks by volume name."""
        for ref in record.volume_refs.values():
            if ref.copied and ref.folder not in self._volumes:
                message = f"the volume {ref.name} has no content yet"
                raise VirtbusError(Code.UNAVAILABLE, "volume_not_filled", message, after_ms=500)
        made = {}
        for volume in record.spec.volumes:
            if not volume.is_iso:
                image = record.image_of(volume)
                digest = self._add(image, record.target_of(volume)) if image else ""
                image_format = ImageFormat.QCOW2 if digest else None
                made[volume.name] = MadeDisk(
                    virtual_size_bytes=0, digest=digest, image_format=image_format
                )
        self._volumes |= {ref.folder for ref in record.volume_refs.values()}
        self._disks[record.uid] = frozenset(disk.digest for disk in made.values() if disk.digest)
        return made

    def release_volume(self, want: VolumeRelease) -> VolumeReleased:
        found = want.ref.folder in self._volumes
        self._volumes.discard(want.ref.folder)
        return VolumeReleased(found=found)

    def export(self, want: ExportWork) -> WorkState:
        """Export an empty file. The first request begins, the second completes."""
        if want.do == "remove" or (want.do == "cancel" and not self._exports.get(want.id)):
            self._exports.pop(want.id, None)
            return WorkState(state="none")
        if want.id not in self._exports:
            self._exports[want.id] = False
            return WorkState(state="working", step="convert")
        self._exports[want.id] = True
        digest = f"sha256:{hashlib.sha256().hexdigest()}"
        result = ExportResult(path=f"/{want.id}/disk.{want.format}", size_bytes=0, digest=digest)
        return WorkState(state="done", result=result)

    def fill(self, want: FillWork) -> WorkState:
        """Fill a volume. The first request begins, the second completes."""
        if want.ref.folder in self._volumes:
            return WorkState(state="done", virtual_size_bytes=want.ref.size_bytes)
        if want.do == "cancel":
            self._fills.discard(want.id)
            return WorkState(state="none")
        if want.id in self._fills:
            self._volumes.add(want.ref.folder)
            return self.fill(want)
        self._fills.add(want.id)
        return WorkState(state="working", step="copy")

    def backup(self, want: BackupWork) -> WorkState:
        """Make a backup without data. The first request begins, the second completes."""
        if want.do == "cancel" and not self._backups.get(want.id):
            self._backups.pop(want.id, None)
            return WorkState(state="none")
        if want.id not in self._backups:
            self._backups[want.id] = None
            return WorkState(state="working", step="store")
        names = {"id", "uid", "namespace", "name", "node", "owner"}
        fields = want.model_dump(include=names) | {"created_ns": 1, "full_because": "simulated"}
        self._backups[want.id] = BackupManifest.model_validate(fields)
        return WorkState(state="done")

    def backups(self, want: BackupsAsk) -> HeldBackups:
        """List, get or delete backups."""
        made = {id_: one for id_, one in self._backups.items() if one is not None}
        wanted = [want.id] if want.id else sorted(id_ for id_ in made if id_ > want.after)
        items = tuple(HeldBackup(id=id_, manifest=made[id_]) for id_ in wanted if id_ in made)
        if want.do == "delete" and want.id:
            self._backups.pop(want.id, None)
        return HeldBackups(items=items)

    def snapshot(self, want: SnapshotWork) -> WorkState:
        """Make or restore a snapshot at once, without data."""
        if want.do == "cancel" and want.snapshot.folder not in self._snapshots:
            return WorkState(state="none")
        self._snapshots.add(want.snapshot.folder)
        return WorkState(state="done")

    def release_snapshot(self, want: SnapshotRelease) -> SnapshotReleased:
        found = want.ref.folder in self._snapshots
        self._snapshots.discard(want.ref.folder)
        return SnapshotReleased(found=found)

    def release(self, uid: str) -> None:
        """Forget the images that the VM's disks use."""
        self._disks.pop(uid, None)

    def forget(self, ref: str) -> ForgottenImage:
        """Remove a name, or all names of a digest; return these names and the image's VMs.

        Raises:
            VirtbusError: 404 `image_unknown`: no image has this name or digest.
        """
        names = [
            name
            for name, digest in self._digests.items()
            if ref in {name, digest, f"{name}@{digest}"}
        ]
        if not names:
            message = f"no image {ref} is stored here; `virtbus image list` shows what is"
            raise VirtbusError(Code.NOT_FOUND, "image_unknown", message)
        digests = {self._digests.pop(name) for name in names}
        used_by = (uid for uid, used in self._disks.items() if used & digests)
        return ForgottenImage(names=tuple(sorted(names)), used_by=tuple(sorted(used_by)))

    def _info(self, digest: str) -> ImageInfo:
        return ImageInfo(
            digest=digest,
            names=tuple(sorted(name for name, each in self._digests.items() if each == digest)),
            format=ImageFormat.QCOW2,
            size_bytes=0,
            virtual_size_bytes=0,
        )


@functools.lru_cache(maxsize=1024)
def _parsed(ref: str) -> tuple[str, str]:
    """Return the name or URL of an image, and its digest."""
    try:
        locator, digest, _ = parse_image_ref(ref)
    except ValueError as error:
        raise invalid((Detail(path="ref", message=str(error)),)) from None
    return locator, digest or f"sha256:{hashlib.sha256(locator.encode()).hexdigest()}"
