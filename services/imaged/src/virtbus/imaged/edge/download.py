"""Downloads images from http(s) URLs into partial files, with resume, retries and limits."""

from dataclasses import dataclass
from typing import NoReturn

import aiohttp

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.links import PartNote, file_name
from virtbus.imaged.core.sources import Validators, check_url, resumed_total, shown
from virtbus.imaged.core.transports import Transport, limits_by
from virtbus.imaged.edge.body import Body
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.http import Http
from virtbus.imaged.edge.image_server import ImageServer
from virtbus.imaged.edge.local_files import Fetched, OnBytes, too_large
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.routes import DIRECT, Route
from virtbus.imaged.edge.transient import TransientError
from virtbus.schemas.errors import Code, VirtbusError


class Downloads:
    """Downloads http(s) URLs into parts (`PartialDownload`)."""

    def __init__(self, limits: TransferLimits, threads: DiskThreads, route: Route = DIRECT) -> None:
        self._limits = limits
        self._threads = threads
        self.http = Http(limits, route)

    def of_pull(self, transport: Transport, route: Route) -> "Downloads":
        return Downloads(limits_by(self._limits, transport), self._threads, route)

    async def fetch(  # noqa: PLR0913  each describes the transfer
        self,
        url: str,
        part: PartialDownload,
        known: Validators,
        on_bytes: OnBytes,
        *,
        pinned: bool = False,
        site: ImageServer | None = None,
        size_bytes: int | None = None,
    ) -> Fetched:
        """Fill `part` with the body of `url`, with resume and retries within the limits.

        `known` are the validators of the stored copy. The result is `unchanged` if the server still
        has that version. A body must have a length or chunks if the digest is not `pinned`. `site`
        adds headers to each request and interprets errors. `size_bytes` is the required length, if
        known. After a cancellation the part has the bytes received so far.

        Raises:
            VirtbusError: 400 `image_url_*`. 403 `redirect_refused`, `image_denied`. 404
                `image_not_found`. 413 `image_too_large`. 422 `image_source_refused`,
                `content_encoding`, `image_length_unknown`, `too_many_redirects`. 503
                `image_unreachable`, `image_quota`, `disk_full`, `store_error`.
        """
        check_url(url)
        noted = _noted(url, pinned=pinned)
        whole = size_bytes is not None
        await self._threads.run(lambda: part.resume(noted, whole=whole))
        while await self._threads.run(part.hash_more):
            on_bytes(part.offset, size_bytes)
        if size_bytes is not None and part.offset == size_bytes:
            return Fetched(Validators())
        site = site or ImageServer(url)
        request = _Request(
            self.http,
            site,
            self._limits,
            self._threads,
            url,
            noted,
            part,
            known,
            on_bytes,
            pinned,
            size_bytes,
        )
        return await self.http.insist(site, request.attempt)


@dataclass(frozen=True, slots=True)
class _Request:
    """The transfer of one URL into one part."""

    _http: Http
    _site: ImageServer
    _limits: TransferLimits
    _threads: DiskThreads
    _url: str
    _noted: str
    _part: PartialDownload
    _known: Validators
    _on_bytes: OnBytes
    _pinned: bool
    _size_bytes: int | None

    async def attempt(self) -> Fetched:
        """Follow redirects and read the body.

        Raises:
            TransientError, AgainError: another attempt may help.
            VirtbusError: the errors of `Downloads.fetch`.
        """
        headers = self._site.headers() | self._headers()
        async with self._http.get(self._site, self._url, headers) as response:
            return await self._take(response)

    def _headers(self) -> dict[str, str]:
        note = self._part.note
        if self._part.offset and note is not None:
            return {
                "Range": f"bytes={self._part.offset}-",
                "If-Range": Validators(note.etag, note.last_modified).if_range,
            }
        if self._known.etag:
            return {"If-None-Match": self._known.etag}
        if self._known.last_modified:
            return {"If-Modified-Since": self._known.last_modified}
        return {}

    async def _take(self, response: aiohttp.ClientResponse) -> Fetched:
        validators = Validators(
            response.headers.get("ETag", "")[:256], response.headers.get("Last-Modified", "")[:64]
        )
        if response.status == 304 and self._known != Validators():
            return Fetched(self._known, unchanged=True)
        if response.status not in {200, 206}:
            await self._refuse_status(response)
        self._site.accepted()
        self._site.check_encoding(response)
        total = await self._begin(response, validators)
        body = Body(self._limits, self._threads, self._site.what, self._part)
        await body.receive(response.content, total, self._on_bytes)
        return Fetched(validators)

    async def _begin(self, response: aiohttp.ClientResponse, validators: Validators) -> int | None:
        """Keep the bytes of the part if the body continues them; otherwise drop them.

        Return the size of the whole file in bytes, None if it is unknown.
        """
        part, note = self._part, self._part.note
        if response.status == 206:
            total = resumed_total(response.headers.get("Content-Range", ""), part.offset)
            if note is None or total is None or not _same(note, validators, total):
                await self._threads.run(part.restart, None)
                raise TransientError("the server's file changed; starting over")
            self._refuse_large(total)
            await self._threads.run(part.expect, total - part.offset)
            return total
        total = response.content_length
        if self._size_bytes is not None and total not in {None, self._size_bytes}:
            raise TransientError(f"the server announces {total} of {self._size_bytes} bytes")
        total = self._size_bytes if total is None else total
        framed = total is not None or "chunked" in response.headers.get("Transfer-Encoding", "")
        if not framed and not self._pinned:
            raise VirtbusError(
                Code.UNSUPPORTED,
                "image_length_unknown",
                f"{shown(self._site.what)} does not say how long it is, so a cut could not be "
                "noticed; "
                "pin the image with @sha256:<digest>",
            )
        self._refuse_large(total or 0)
        fresh = PartNote(
            url=self._noted,
            etag=validators.etag,
            last_modified=validators.last_modified,
            total_bytes=total,
        )
        await self._threads.run(part.restart, fresh if validators.if_range else None)
        await self._threads.run(part.expect, total or 0)
        return total

    def _refuse_large(self, total: int) -> None:
        if total > self._limits.max_bytes:
            raise too_large(self._site.what, total, self._limits.max_bytes)

    async def _refuse_status(self, response: aiohttp.ClientResponse) -> NoReturn:
        if response.status == 416:
            await self._threads.run(self._part.restart, None)
            raise TransientError("the server's file is shorter than the bytes that were fetched")
        await self._site.refuse(response)


def _noted(url: str, *, pinned: bool) -> str:
    """Return the URL for the part's note. Its query is hashed, or omitted if `pinned`."""
    bare, mark, query = url.partition("?")
    return f"{bare}?{file_name(query)}" if mark and not pinned else bare


def _same(note: PartNote, validators: Validators, total: int) -> bool:
    return (
        note.total_bytes in {None, total}
        and validators.etag in {"", note.etag}
        and validators.last_modified in {"", note.last_modified}
    )
