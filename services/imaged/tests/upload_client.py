"""A client that uploads a file, and imaged's side of it without a bus."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from services.imaged.tests.site_under_test import FAST, Node

from virtbus.imaged.core.uploads import UploadLimits
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.uploads import Uploads
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.image_upload import UploadedImage, UploadImage

KIB = 1024


@contextlib.asynccontextmanager
async def receiving(
    node: Node, threads: DiskThreads, limits: UploadLimits | None = None, **bounds: Any
) -> AsyncIterator[Uploads]:
    """Receive uploads; leaving is a clean stop."""
    made: asyncio.Future[Uploads] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            uploads = Uploads(
                group,
                store=node.store,
                threads=threads,
                names=AliasFiles(node.names_dir, {}, (str(node.source_dir),)),
                images=node.images,
                limits=replace(FAST, **{"rate_window_s": 30.0, **bounds}),
                uploads=limits or UploadLimits(),
            )
            made.set_result(uploads)
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as outer:
        service = outer.create_task(run())
        yield await made
        service.cancel()


@dataclass
class Client:
    """Sends `data` under `name`; `lies` replaces fields of its requests."""

    uploads: Uploads
    data: bytes
    name: str = "mine/1"
    account: str = "CLIENT"
    piece_bytes: int = 64 * KIB
    lies: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"

    async def ask(self, at: int = 0, data: bytes = b"") -> UploadedImage:
        fields = {"name": self.name, "digest": self.digest, "size_bytes": len(self.data)}
        want = UploadImage.model_validate({**fields, "at": at, "data": data, **self.lies})
        return await self.uploads.take(want, self.account, 10.0)

    async def piece(self, at: int) -> UploadedImage:
        return await self.ask(at, self.data[at : at + self.piece_bytes])

    async def send(self, *, until: int | None = None) -> ImageInfo | None:
        """Send all that is missing, or bytes up to `until`; return the image."""
        state = await self.ask()
        while state.image is None:
            if until is not None and state.offset_bytes >= until:
                return None
            whole = state.offset_bytes >= len(self.data)
            state = await (self.ask(len(self.data)) if whole else self.piece(state.offset_bytes))
        return state.image
