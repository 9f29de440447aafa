"""The webhooks: admission reviews of the API server, answered (ADR 0025).

Whoever reaches the port may ask, for API servers show webhooks no certificate unless told to:
nothing is changed by an answer, and no question costs more than these bounds (ADR 0029). A body is
read before anything is waited for, so who sends slowly holds up nobody.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from virtbus.bus.shares import Shares
from virtbus.bus.threads import to_end
from virtbus.kubebridge.core.admission import answer
from virtbus.kubebridge.core.bounds import check_values, values_at_most
from virtbus.kubebridge.core.plain import part, text
from virtbus.kubebridge.edge.lane import Lane

MAX_BYTES = 8 * 1024**2
"""Of a review; it holds an object twice at the most, of 3 MiB each at the API server's most."""
MAX_VALUES = 40_000
"""Of a review: two objects as large as a message on the bus may be. One costs 0.6 s at most."""
ANSWER_S = 10.0
"""Until a review is answered; API servers wait as long for its answer (`timeoutSeconds`)."""
IDLE_S = 2.0
"""Between two parts of a body: API servers send it whole."""
HELD_BYTES = 64 * 1024**2
"""Of all bodies that are held in memory; who sends most of them is refused first."""
LARGE_BYTES, LARGE_VALUES = 64 * 1024, 4000
"""A review of more is looked at in a thread; others take 0.1 s at most."""
MUTATE, VALIDATE = "/admission/mutate", "/admission/validate"
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.Response]]
Known = Callable[[web.Request], bool]


def anybody(_request: web.Request) -> bool:
    """API servers show webhooks no certificate unless told to."""
    return True


def routes(
    known: Known = anybody, *, answer_s: float = ANSWER_S, idle_s: float = IDLE_S
) -> list[web.RouteDef]:
    """The two webhooks, for the server to add; only who is `known` is answered."""
    reviews = _Reviews(known, answer_s, idle_s)
    return [web.post(MUTATE, reviews.mutate), web.post(VALIDATE, reviews.validate)]


class _Reviews:
    def __init__(self, known: Known, answer_s: float, idle_s: float) -> None:
        self._known = known
        self._answer_s = answer_s
        self._idle_s = idle_s
        self._held = Shares(HELD_BYTES)
        self._small, self._large = Lane(), Lane()
        self._beside = ThreadPoolExecutor(1, "review")

    async def mutate(self, request: web.Request) -> web.Response:
        return await self._handle(request, mutating=True)

    async def validate(self, request: web.Request) -> web.Response:
        return await self._handle(request, mutating=False)

    async def _handle(self, request: web.Request, *, mutating: bool) -> web.Response:
        if not self._known(request):
            raise web.HTTPUnauthorized(text="show the front proxy's certificate")
        source = request.remote or ""
        try:
            async with asyncio.timeout(self._answer_s), self._body(request, source) as body:
                said = await self._answered(body, source, mutating)
        except TimeoutError:
            message = f"no review within {self._answer_s:g} s, or nothing of it for a while"
            raise web.HTTPRequestTimeout(text=message) from None
        except (ValueError, RecursionError) as error:
            _log.warning("a review was refused: %.200s", error, extra={"code": "bad_review"})
            raise web.HTTPBadRequest(text=f"{error!s:.200}") from None
        return web.json_response(said)

    async def _answered(self, body: bytes, source: str, mutating: bool) -> Any:
        said = body.decode()
        check_values(said, MAX_VALUES)
        review = json.loads(said)
        namespace = text(part(review, "request"), "namespace")
        if len(body) <= LARGE_BYTES and values_at_most(said) <= LARGE_VALUES:
            async with self._small.turn(source, namespace):
                return answer(review, mutating=mutating)
        async with self._large.turn(source, namespace):
            # To its end, which is near, so that never more than one thread is at work.
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._beside, lambda: answer(review, mutating=mutating))
            return await to_end(work)

    @asynccontextmanager
    async def _body(self, request: web.Request, source: str) -> AsyncIterator[bytes]:
        """The body, as long as it is no longer than a review may be; held within the bounds."""
        body = bytearray()
        try:
            if (request.content_length or 0) > MAX_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_BYTES, request.content_length or 0)
            while data := await self._next_part(request):
                if not self._held.take(source, len(data)):
                    raise web.HTTPServiceUnavailable(text="too many reviews at once; ask again")
                body += data
                if len(body) > MAX_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BYTES, len(body))
            yield bytes(body)
        finally:
            if body:
                self._held.release(source, len(body))

    async def _next_part(self, request: web.Request) -> bytes:
        """What came of the body, empty at its end; TimeoutError where nothing comes."""
        async with asyncio.timeout(self._idle_s):
            return await request.content.readany()
