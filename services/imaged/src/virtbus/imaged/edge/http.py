"""Sends HTTP GET requests, with rules for addresses, redirects, time and attempts.

The limits are in `core.limits`, the address rules in `core.addresses`. An address is checked when
its socket is made, so the checked address is the connected address. The resolution of the name and
the spelling of the host do not matter (SRC-03, SRC-04).

Until a server has answered, the client gets the same error for every failure. A failure may be a
closed port, a filtered port, a forbidden address, an unknown name, or another protocol. Code, text
and number of attempts do not differ, so a client cannot scan the node's network. Only imaged's log
has the real reason, for the operator.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from virtbus.bus.runtime.backoff import delays
from virtbus.imaged.core.addresses import Network, refusal
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.sources import (
    check_url,
    origin_of,
    redirect_target,
    shown,
    url_invalid,
)
from virtbus.imaged.edge.http_failures import reason_of
from virtbus.imaged.edge.image_server import ImageServer
from virtbus.imaged.edge.proxied_names import refusal_by_proxy
from virtbus.imaged.edge.routes import DIRECT, Route
from virtbus.imaged.edge.transient import AgainError, TransientError
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

T = TypeVar("T")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NO_ANSWER = "its server gave no answer that can be used"
_BUFFER_BYTES = 1024**2
"""Buffer for bytes that arrive while a chunk is hashed; aiohttp stops reading at twice this
size."""


class _AddressGuard:
    """Makes the sockets of one request; `refused` is the reason if its address is forbidden.

    A proxy may have any address, because the node's operator has configured it.
    """

    def __init__(self, allowed: tuple[Network, ...], *, proxied: bool = False) -> None:
        self._allowed = allowed
        self._proxied = proxied
        self.refused = ""

    def socket(self, info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        why = "" if self._proxied else refusal(str(address[0]), self._allowed)
        if why:
            self.refused = why
            raise PermissionError(why)
        return socket.socket(family, kind, protocol)


class Http:
    """GET requests with retries."""

    def __init__(self, limits: TransferLimits, route: Route = DIRECT) -> None:
        self.limits = limits
        self._route = route

    async def insist(self, site: ImageServer, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, with repeats within the limits.

        After an AgainError, the next attempt begins at once. After a TransientError, it begins
        after a backoff.

        Raises:
            VirtbusError: 503 `image_unreachable`. The errors of `attempt`.
        """
        attempts, last = 0, ""
        longest_s = self.limits.max_backoff_s
        pauses = delays(self.limits.backoff_s, longest_s)
        try:
            async with asyncio.timeout(self.limits.total_timeout_s):
                while True:
                    attempts += 1
                    try:
                        return await attempt()
                    except AgainError:
                        attempts -= 1
                        continue
                    except TransientError as error:
                        if attempts >= self.limits.attempts:
                            raise _unreachable(site, str(error), attempts) from error
                        pause_s = max(min(error.after_s, longest_s), next(pauses))
                        last = f"; {error}"
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            why = f"it took longer than {self.limits.total_timeout_s:g} s{last}"
            raise _unreachable(site, why, attempts) from None

    @asynccontextmanager
    async def get(
        self, site: ImageServer, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response after redirects.

        `Authorization` is never sent to another server (SRC-13).

        Raises:
            TransientError: another attempt may help.
            VirtbusError: 400 `image_url_*`. 403 `redirect_refused`. 422 `too_many_redirects`.
        """
        current = url
        for _ in range(self.limits.max_redirects + 1):
            same = origin_of(current) == origin_of(url)
            kept = {k: v for k, v in headers.items() if same or k != "Authorization"}
            async with self._open(site, current, kept) as response:
                if response.status not in _REDIRECTS:
                    yield response
                    return
                current = redirect_target(url, current, response.headers.get("Location", ""))
        raise VirtbusError(
            Code.UNSUPPORTED,
            "too_many_redirects",
            f"{shown(site.what)} redirects more than {self.limits.max_redirects} times; "
            "use the final address of the image",
        )

    @asynccontextmanager
    async def _open(
        self, site: ImageServer, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        check_url(url)
        guard = _AddressGuard(self.limits.allowed_addresses, proxied=self._route.proxy is not None)
        answered = False
        try:
            async with _session(self.limits, guard) as session:
                async with asyncio.timeout(self.limits.header_timeout_s):
                    await self._check_proxied(url)
                    response = await self._send(session, site, url, headers)
                answered = True
                async with response:
                    yield response
        except TimeoutError:
            raise _failed(url, "it did not answer in time", answered=answered) from None
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.InvalidURL) and not guard.refused:
                raise url_invalid(url) from error
            why = guard.refused or reason_of(error)[:300]
            raise _failed(url, why, answered=answered) from error

    async def _check_proxied(self, url: str) -> None:
        """Refuse a forbidden address that a proxy would connect to (ADR 0035)."""
        if self._route.proxy is None:
            return
        why = await refusal_by_proxy(origin_of(url)[1], self.limits.allowed_addresses)
        if why:
            raise _failed(url, why, answered=False)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        site: ImageServer,
        url: str,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Send one request. Only the image's own server gets the route's `authorization`."""
        route, own = self._route, origin_of(url) == origin_of(site.url)
        sent = {**headers, "Accept-Encoding": "identity", "User-Agent": "virtbus-imaged"}
        if own and route.authorization:
            sent.setdefault("Authorization", route.authorization)
        to_proxy = {}
        if route.proxy_authorization:
            to_proxy["Proxy-Authorization"] = route.proxy_authorization
        if to_proxy and url.startswith("http:"):  # with https, only CONNECT has this header
            sent |= to_proxy
        return await session.get(
            url,
            headers=sent,
            allow_redirects=False,
            proxy=route.proxy,
            proxy_headers=to_proxy or None,
            ssl=route.own_tls if own else route.tls,
            server_hostname=route.server_name if own else None,
        )


def _failed(url: str, why: str, *, answered: bool) -> TransientError:
    """Log a failed attempt and return its error, which has `why` only if the server `answered`."""
    log.warning("%s: %s", shown(url), why, extra={"code": "image_source_failed"})
    return TransientError(why if answered else _NO_ANSWER)


def _session(limits: TransferLimits, guard: _AddressGuard) -> aiohttp.ClientSession:
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


def _unreachable(site: ImageServer, why: str, attempts: int) -> VirtbusError:
    tries = f"{attempts} attempts; last: " if attempts > 1 else ""
    return VirtbusError(
        Code.UNAVAILABLE,
        "image_unreachable",
        f"{shown(site.what)} could not be fetched ({tries}{why}); {site.next_step}",
    )
