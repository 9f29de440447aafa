"""http(s) sources: the one door to aiohttp.

Every bound is in `core.limits`, every rule about addresses in `core.sources`. The address is
checked where the socket is made, so it is the one that is connected to, whatever a name resolved
to before and however its host was spelled (SRC-03, SRC-04).
"""

import asyncio
import email.utils
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp

from virtbus.imaged.core.limits import Limits
from virtbus.imaged.core.links import PartNote
from virtbus.imaged.core.sources import (
    Validators,
    address_refusal,
    check_url,
    is_literal_loopback,
    redirect_target,
    resumed_total,
    shown,
    url_invalid,
)
from virtbus.imaged.edge.body import Body
from virtbus.imaged.edge.diskthreads import DiskThreads
from virtbus.imaged.edge.http_failures import reason_of
from virtbus.imaged.edge.localfile import Fetched, OnBytes, not_found, too_large
from virtbus.imaged.edge.part import Part
from virtbus.imaged.edge.transient import TransientError
from virtbus.schemas.errors import Code, VirtbusError

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BUFFER_BYTES = 1024**2
"""What arrives while the last chunk is hashed; aiohttp pauses the sender at twice this."""
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class _AddressGuard:
    """Makes sockets for one request, or refuses; `refused` says why."""

    def __init__(self, *, loopback_allowed: bool) -> None:
        self._loopback_allowed = loopback_allowed
        self.refused = ""

    def socket(self, info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        refusal = address_refusal(str(address[0]), loopback_allowed=self._loopback_allowed)
        if refusal:
            self.refused = refusal
            raise PermissionError(refusal)
        return socket.socket(family, kind, protocol)


class Downloads:
    """Fetches http(s) URLs into parts."""

    def __init__(
        self,
        limits: Limits,
        threads: DiskThreads,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limits = limits
        self._threads = threads
        self._sleep = sleep
        self._random = random.SystemRandom()

    async def fetch(
        self, url: str, part: Part, known: Validators, on_bytes: OnBytes, *, pinned: bool = False
    ) -> Fetched:
        """Fill `part` with the body of `url`, resuming it and retrying within the limits.

        `known` names what the store has of `url`: the answer may be `unchanged`. Not pinned by a
        digest, a body whose end the server does not announce is refused. Cancelled, the part
        holds a prefix.

        Raises:
            VirtbusError: 400 `image_url_*`; 403 `address_refused`, `redirect_refused`,
                `image_denied`; 404 `image_not_found`; 413 `image_too_large`; 422
                `image_source_refused`, `content_encoding`, `image_length_unknown`,
                `too_many_redirects`; 503 `image_unreachable`, `disk_full`, `store_error`.
        """
        check_url(url)
        await self._threads.run(part.resume, url)
        while await self._threads.run(part.hash_more):
            pass
        request = _Request(self._limits, self._threads, url, part, known, on_bytes, pinned)
        attempt, last = 0, ""
        try:
            async with asyncio.timeout(self._limits.total_timeout_s):
                while True:
                    attempt += 1
                    try:
                        return await request.attempt()
                    except TransientError as error:
                        if attempt >= self._limits.attempts:
                            raise _unreachable(url, str(error), attempt) from error
                        pause_s, last = self._pause_s(attempt, error.after_s), f"; {error}"
                    await self._sleep(pause_s)
        except TimeoutError:
            why = f"it took longer than {self._limits.total_timeout_s:g} s{last}"
            raise _unreachable(url, why, attempt) from None

    def _pause_s(self, attempt: int, after_s: float) -> float:
        limits = self._limits
        longest = min(limits.max_backoff_s, limits.backoff_s * float(1 << (attempt - 1)))
        return max(min(after_s, limits.max_backoff_s), longest * self._random.uniform(0.5, 1.0))


@dataclass(frozen=True, slots=True)
class _Request:
    """One URL on its way into one part."""

    _limits: Limits
    _threads: DiskThreads
    _url: str
    _part: Part
    _known: Validators
    _on_bytes: OnBytes
    _pinned: bool

    async def attempt(self) -> Fetched:
        """Follow redirects, take the body; TransientError where another attempt may help."""
        current = self._url
        for _ in range(self._limits.max_redirects + 1):
            async with self._open(current) as response:
                if response.status not in _REDIRECTS:
                    return await self._take(response)
                current = redirect_target(self._url, current, response.headers.get("Location", ""))
        raise VirtbusError(
            Code.UNSUPPORTED,
            "too_many_redirects",
            f"{shown(self._url)} redirects more than {self._limits.max_redirects} times; "
            "use the final address of the image",
        )

    @asynccontextmanager
    async def _open(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        host = check_url(url).hostname or ""
        guard = _AddressGuard(
            loopback_allowed=self._limits.allow_loopback and is_literal_loopback(host)
        )
        try:
            async with _session(self._limits, guard) as session:
                async with asyncio.timeout(self._limits.header_timeout_s):
                    response = await session.get(
                        url, headers=self._headers(), allow_redirects=False
                    )
                async with response:
                    yield response
        except TimeoutError:
            raise TransientError("the server did not answer in time") from None
        except aiohttp.ClientError as error:
            if guard.refused:
                raise _address_refused(url, guard.refused) from error
            if isinstance(error, aiohttp.InvalidURL):
                raise url_invalid(url) from error
            if isinstance(error, aiohttp.ClientSSLError):
                raise _unreachable(url, reason_of(error)[:300], 1) from error
            raise TransientError(reason_of(error)[:300]) from error

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "virtbus-imaged"}
        note = self._part.note
        if self._part.offset and note is not None:
            headers["Range"] = f"bytes={self._part.offset}-"
            headers["If-Range"] = Validators(note.etag, note.last_modified).if_range
        elif self._known.etag:
            headers["If-None-Match"] = self._known.etag
        elif self._known.last_modified:
            headers["If-Modified-Since"] = self._known.last_modified
        return headers

    async def _take(self, response: aiohttp.ClientResponse) -> Fetched:
        validators = Validators(
            response.headers.get("ETag", "")[:256], response.headers.get("Last-Modified", "")[:64]
        )
        if response.status == 304 and self._known != Validators():
            return Fetched(self._known, unchanged=True)
        if response.status not in {200, 206}:
            await self._refuse_status(response)
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            raise VirtbusError(
                Code.UNSUPPORTED,
                "content_encoding",
                f"{shown(self._url)} comes as {encoding[:32]!r} although identity was asked for; "
                "configure its server to send the file as it is",
            )
        total = await self._begin(response, validators)
        body = Body(self._limits, self._threads, self._url, self._part)
        await body.receive(response.content, total, self._on_bytes)
        return Fetched(validators)

    async def _begin(self, response: aiohttp.ClientResponse, validators: Validators) -> int | None:
        """Decide whether the body continues the part or replaces it; the whole size if known."""
        part, note = self._part, self._part.note
        if response.status == 206:
            total = resumed_total(response.headers.get("Content-Range", ""), part.offset)
            if note is None or total is None or not _same(note, validators, total):
                await self._threads.run(part.restart, None)
                raise TransientError("the server's file changed; starting over")
            return total
        total = response.content_length
        framed = total is not None or "chunked" in response.headers.get("Transfer-Encoding", "")
        if not framed and not self._pinned:
            raise VirtbusError(
                Code.UNSUPPORTED,
                "image_length_unknown",
                f"{shown(self._url)} does not say how long it is, so a cut could not be noticed; "
                "pin the image with @sha256:<digest>",
            )
        if total is not None and total > self._limits.max_bytes:
            raise too_large(self._url, total, self._limits.max_bytes)
        fresh = PartNote(
            url=self._url,
            etag=validators.etag,
            last_modified=validators.last_modified,
            total_bytes=total,
        )
        await self._threads.run(part.restart, fresh if validators.if_range else None)
        await self._threads.run(part.expect, total or 0)
        return total

    async def _refuse_status(self, response: aiohttp.ClientResponse) -> NoReturn:
        status = response.status
        if status in {404, 410}:
            raise not_found(self._url)
        if status == 416:
            await self._threads.run(self._part.restart, None)
            raise TransientError("the server's file is shorter than what was fetched")
        if status in _TRANSIENT_STATUS:
            raise TransientError(f"the server answers {status}", _retry_after_s(response))
        denied = status in {401, 403}
        raise VirtbusError(
            Code.DENIED if denied else Code.UNSUPPORTED,
            "image_denied" if denied else "image_source_refused",
            f"the server of {shown(self._url)} answers {status}; "
            "open the address in a browser to see why, and use one that needs no login",
        )


def _same(note: PartNote, validators: Validators, total: int) -> bool:
    return (
        note.total_bytes in {None, total}
        and validators.etag in {"", note.etag}
        and validators.last_modified in {"", note.last_modified}
    )


def _session(limits: Limits, guard: _AddressGuard) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        socket_factory=guard.socket, force_close=True, use_dns_cache=False
    )
    timeout = aiohttp.ClientTimeout(total=None, connect=limits.connect_timeout_s)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=_BUFFER_BYTES,
        requote_redirect_url=False,
    )


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    text = response.headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text[:6])
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, at - time.time())


def _address_refused(url: str, why: str) -> VirtbusError:
    return VirtbusError(
        Code.DENIED,
        "address_refused",
        f"{shown(url)} is not fetched: {why}; use an image server on a routed address",
    )


def _unreachable(url: str, why: str, attempts: int) -> VirtbusError:
    tries = f"{attempts} attempts; last: " if attempts > 1 else ""
    return VirtbusError(
        Code.UNAVAILABLE,
        "image_unreachable",
        f"{shown(url)} could not be fetched ({tries}{why}); "
        "check the address, its server and this node's network",
    )
