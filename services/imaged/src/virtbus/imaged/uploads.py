"""Receives images from clients, piece by piece, and stores them under names (ADR 0047).

An upload is a partial download whose bytes a client sends. Its part is named by the account, the
digest and the size. So the upload continues after a restart of the client, of imaged or of the
host.
"""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.client.fair_shares import FairShares
from virtbus.bus.runtime.recent import Recent
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.links import NameLink, PartNote, file_name
from virtbus.imaged.core.uploads import UploadLimits, mismatch, name_taken, stalled, too_many
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.local_files import too_large
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.partial_downloads import open_part
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.edge.uploaded_names import uploaded_names
from virtbus.imaged.images import Images
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.image_upload import UploadedImage, UploadImage

log = logging.getLogger(__name__)

STEP_BYTES = 8 * 1024**2
"""A crash loses at most about STEP_BYTES of an upload."""
MAX_FAILED = 100
"""Number of failed uploads whose errors are remembered."""
OWN_ACCOUNT = "node"
"""The owner of uploads by the node's own account."""


class _Upload:
    """One running upload. `part` is set while bytes are accepted."""

    def __init__(self, want: UploadImage, owner: str) -> None:
        self.want = want
        self.owner = owner
        self.key = _key(want, owner)
        self.part: PartialDownload | None = None
        self.saved_bytes = 0
        self.turn = asyncio.Lock()
        """Held while a piece is written: pieces are written in the order of their arrival."""
        self.ready = asyncio.Event()
        """Set when the earlier bytes are hashed, and at the end."""
        self.complete = asyncio.Event()
        """Set when all bytes are there, or a piece could not be written."""
        self.ended = asyncio.Event()
        self.image: ImageInfo | None = None
        self.error: VirtbusError | None = None


class Uploads:
    """The uploads of a node. `changed` is called when the list of images may have changed."""

    def __init__(  # noqa: PLR0913  all collaborators are named here once
        self,
        group: asyncio.TaskGroup,
        *,
        store: ImageStore,
        threads: DiskThreads,
        names: AliasFiles,
        images: Images,
        limits: TransferLimits,
        uploads: UploadLimits,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self._store = store
        self._threads = threads
        self._names = names
        self._images = images
        self._limits = limits
        self._uploads = uploads
        self._changed = changed
        self._shares = FairShares(uploads.at_once)
        self._failed: Recent[str, VirtbusError] = Recent(MAX_FAILED)
        """The errors of the last failed uploads by key, for clients that did not get them yet."""
        self._naming = asyncio.Lock()
        """Held while an image gets a name, so that two uploads cannot both get the same name."""
        self._running: dict[str, _Upload] = {}

    async def take(self, want: UploadImage, account: str, wait_s: float) -> UploadedImage:
        """Store a piece, or answer how many bytes are there; wait at most `wait_s`.

        Each request may be repeated. A piece that begins after the end of the stored bytes is not
        stored. Any other piece adds its bytes that are missing.

        Raises:
            VirtbusError: 400 `upload_beyond_size`. 409 `image_name_taken`, `digest_mismatch`. 413
                `image_too_large`. 429 `upload_limit`, `uploads_busy`. 503 `upload_stalled`,
                `image_quota`, `disk_full`, `store_error`, `image_names_invalid`, `recovering`. 504
                `upload_checking`. The errors of `Images.received`.
        """
        if want.at + len(want.data) > want.size_bytes:
            raise VirtbusError(
                Code.INVALID,
                "upload_beyond_size",
                f"bytes up to {want.at + len(want.data)} do not belong to a file of "
                f"{want.size_bytes} bytes; announce the size that the file has",
            )
        owner = account or OWN_ACCOUNT
        upload = self._running.get(_key(want, owner))
        if upload is None:
            stored = self._store.pinned(want.digest)
            if stored is not None:  # it was uploaded or fetched before
                await self._name(want, owner, stored)
                await self._threads.run(self._store.space.drop, file_name(_key(want, owner)))
                return UploadedImage(offset_bytes=want.size_bytes, image=stored)
            self._refuse_failed(want, _key(want, owner))
            upload = self._begin(want, owner)
        return await self._answered(upload, want, wait_s)

    def _refuse_failed(self, want: UploadImage, key: str) -> None:
        """Raise the error that ended an upload; forget it if a client begins the upload again."""
        if want.data or want.at == want.size_bytes:
            if key in self._failed:
                raise self._failed[key]
        else:
            self._failed.pop(key, None)

    async def _answered(self, upload: _Upload, want: UploadImage, wait_s: float) -> UploadedImage:
        end_s = asyncio.get_running_loop().time() + wait_s
        await _wait(upload.ready, end_s)
        if want.data:
            return UploadedImage(offset_bytes=await self._append(upload, want))
        if want.name != upload.want.name and not upload.ended.is_set():
            await self._check_name(want)
            upload.want = want  # the latest client's name counts
        at_end = want.at == want.size_bytes and upload.complete.is_set()
        if at_end or upload.part is None:
            await _wait(upload.ended, end_s)
        if upload.error is not None:
            raise upload.error
        if upload.image is not None:
            await self._name(want, upload.owner, upload.image)
        return UploadedImage(offset_bytes=_offset(upload), image=upload.image)

    def _begin(self, want: UploadImage, owner: str) -> _Upload:
        if not self._shares.take(owner):
            raise VirtbusError(
                Code.EXHAUSTED,
                "uploads_busy",
                "this node receives as many uploads as it may at once; wait for one of them",
                after_ms=2000,
            )
        upload = self._running[_key(want, owner)] = _Upload(want, owner)
        self._group.create_task(self._receive(upload))
        return upload

    async def _receive(self, upload: _Upload) -> None:
        """Keep the part of an upload open until it has ended. Raises nothing."""
        try:
            await self._check(upload)
            parts = open_part(self._store, self._threads, upload.key, lambda: False)
            async with parts as part:
                try:
                    await self._resume(upload, part)
                    await self._until_complete(upload, part)
                    upload.image = await self._store_image(upload, part)
                finally:
                    async with upload.turn:  # no piece is being written
                        upload.part = None
        except VirtbusError as error:
            upload.error = error
            log.info("upload %s: %s", upload.want.name, error, extra={"code": error.reason})
        except Exception:  # boundary: one upload's fault must not end the service
            log.exception("an upload failed", extra={"code": "internal"})
            upload.error = VirtbusError(
                Code.INTERNAL, "internal", "the upload failed; see imaged's log"
            )
        finally:
            if upload.image is None and upload.error is None:
                upload.error = _stopping()
            if upload.error is not None and upload.error.body.after_ms is None:
                self._failed[upload.key] = upload.error
            del self._running[upload.key]
            self._shares.release(upload.owner)
            upload.ended.set()
            upload.ready.set()

    async def _check(self, upload: _Upload) -> None:
        want, owner = upload.want, upload.owner
        if want.size_bytes > self._limits.max_bytes:
            raise too_large(want.name, want.size_bytes, self._limits.max_bytes)
        await self._check_name(want)
        parts = await self._threads.run(self._store.space.uploads_of, owner)
        names = uploaded_names(self._store, owner) - {want.name}
        others = parts - {file_name(upload.key)}
        if len(names) + len(others) >= self._uploads.per_account:
            raise too_many(len(names), len(others), self._uploads.per_account)

    async def _check_name(self, want: UploadImage) -> None:
        """Raise 409 `image_name_taken` if another image or a rule has the name here."""
        link = self._store.link(want.name)
        other = link is not None and want.digest not in {link.digest, link.fetched}
        if link is not None and other and self._store.cached(link.digest) is not None:
            raise name_taken(want.name, f"denotes {link.fetched or link.digest}")
        try:
            rule = await self._threads.run(self._names.resolve, want.name)
        except VirtbusError as error:
            if error.reason != "image_unknown":
                raise
        else:
            raise name_taken(want.name, f"is given by the rule {rule.where}")

    async def _resume(self, upload: _Upload, part: PartialDownload) -> None:
        note = PartNote(url=upload.key, total_bytes=upload.want.size_bytes, owner=upload.owner)
        if await self._threads.run(lambda: part.resume(note.url, whole=True)):
            while await self._threads.run(part.hash_more):
                pass
        else:
            await self._threads.run(part.restart, note)
        await self._threads.run(part.expect, upload.want.size_bytes - part.offset)
        upload.saved_bytes = part.offset
        if part.offset == upload.want.size_bytes:
            upload.complete.set()
        upload.part = part
        upload.ready.set()

    async def _append(self, upload: _Upload, want: UploadImage) -> int:
        async with upload.turn:
            if upload.part is not None:
                return await self._write(upload, upload.part, want)
        await upload.ended.wait()
        if upload.error is not None:
            raise upload.error
        return want.size_bytes

    async def _write(self, upload: _Upload, part: PartialDownload, want: UploadImage) -> int:
        known = part.offset - want.at
        if 0 <= known < len(want.data):
            try:
                await self._threads.run(_write, part, want.data[known:], upload)
            except VirtbusError as error:
                upload.error = error
                upload.complete.set()
                raise
            if part.offset == want.size_bytes:
                upload.complete.set()
        return part.offset

    async def _until_complete(self, upload: _Upload, part: PartialDownload) -> None:
        """Wait for all bytes.

        Raises:
            VirtbusError: 503 `upload_stalled`: the client sends less than the minimum rate. The
                error of a failed write.
        """
        window_s = self._limits.rate_window_s
        seen_bytes = part.offset
        while not await wait_for_event(upload.complete, window_s):
            moved_bytes, seen_bytes = part.offset - seen_bytes, part.offset
            if moved_bytes < self._limits.min_rate_bytes_s * window_s:
                raise stalled(moved_bytes, window_s)
        if upload.error is not None:
            raise upload.error

    async def _store_image(self, upload: _Upload, part: PartialDownload) -> ImageInfo:
        want = upload.want
        if f"sha256:{part.hex_digest}" != want.digest:
            raise mismatch(want.name, want.digest, part.hex_digest)
        image = await self._images.received(want.name, upload.key, part)
        await self._name(upload.want, upload.owner, image)
        return image

    async def _name(self, want: UploadImage, owner: str, image: ImageInfo) -> None:
        """Give a stored image the name of an upload.

        Raises:
            VirtbusError: 429 `upload_limit`. The errors of `_check_name`.
        """
        async with self._naming:
            link = self._store.link(want.name)
            if link is not None and link.digest == image.digest and link.uploaded_by:
                return
            await self._check_name(want)
            names = uploaded_names(self._store, owner)
            if len(names) >= self._uploads.per_account:
                raise too_many(len(names), 0, self._uploads.per_account)
            await self._link(want, owner, image)

    async def _link(self, want: UploadImage, owner: str, image: ImageInfo) -> None:
        link = NameLink.of(want.name, image, want.digest)
        link = link.model_copy(update={"uploaded_by": owner})
        with self._store.lease(image.digest):
            await self._threads.run(self._store.write_link, link)
        log.info(
            "image %s was uploaded by %s as %s",
            image.digest,
            owner,
            want.name,
            extra={"code": "image_uploaded"},
        )
        self._changed()


def _key(want: UploadImage, owner: str) -> str:
    return f"upload\n{owner}\n{want.digest}\n{want.size_bytes}"


def _offset(upload: _Upload) -> int:
    return upload.part.offset if upload.part is not None else upload.want.size_bytes


def _write(part: PartialDownload, data: bytes, upload: _Upload) -> None:
    """Append a piece; make the bytes durable in steps, and at the end of the file."""
    part.write(data)
    whole = part.offset == upload.want.size_bytes
    if whole or part.offset - upload.saved_bytes >= STEP_BYTES:
        part.checkpoint()
        upload.saved_bytes = part.offset


def _stopping() -> VirtbusError:
    return VirtbusError(
        Code.UNAVAILABLE, "recovering", "imaged stops; repeat the request", after_ms=500
    )


async def _wait(event: asyncio.Event, end_s: float) -> None:
    if not await wait_for_event(event, max(0.0, end_s - asyncio.get_running_loop().time())):
        raise VirtbusError(
            Code.DEADLINE,
            "upload_checking",
            "the bytes that are there are still being checked; repeat the request to wait longer",
            after_ms=100,
        )
