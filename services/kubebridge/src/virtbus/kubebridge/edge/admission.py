"""Webhooks: answers admission reviews of the API server (ADR 0025).

By default, API servers show webhooks no certificate. Any client that reaches the port may therefore
send a review. An answer changes nothing, and the bounds below limit its cost (ADR 0029). A review
waits for its turn only after its body is read, so a slow sender delays no other review.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from virtbus.bus.client.fair_shares import FairShares
from virtbus.bus.runtime.threads import to_end
from virtbus.kubebridge.core.objects.bounds import check_values, values_at_most
from virtbus.kubebridge.core.objects.unstructured import part, text
from virtbus.kubebridge.core.validation.admission import answer
from virtbus.kubebridge.edge.fair_turns import FairTurns

MAX_BYTES = 8 * 1024**2
"""Largest review. A review has the object at most twice, and an object may have 3 MiB."""
MAX_VALUES = 40_000
"""Maximum number of JSON values in a review, which equals the limit of two bus messages.

A review of this size costs at most 0.6 s of CPU time.
"""
ANSWER_S = 10.0
"""Seconds in which a review must be answered, as in the API server's timeout (`timeoutSeconds`)."""
IDLE_S = 2.0
"""Longest wait in seconds for the next chunk of a body. API servers send a body in one chunk."""
BODIES_BYTES = 64 * 1024**2
"""Largest size of all bodies in memory. The client that sends most is refused first."""
LARGE_BYTES, LARGE_VALUES = 64 * 1024, 4000
"""A review beyond either limit is answered in a thread. A smaller review takes at most 0.1 s."""
MUTATE, VALIDATE = "/admission/mutate", "/admission/validate"
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.Response]]
Accepted = Callable[[web.Request], bool]


def routes(
    accepted: Accepted | None = None, *, answer_s: float = ANSWER_S, idle_s: float = IDLE_S
) -> list[web.RouteDef]:
    """Return the routes of the two webhooks.

    Only requests for which `accepted` returns True get an answer. None accepts all requests.
    """
    reviews = _Reviews(accepted, answer_s, idle_s)
    mutate, validate = (partial(reviews.handle, mutating=mutating) for mutating in (True, False))
    return [web.post(MUTATE, mutate), web.post(VALIDATE, validate)]


class _Reviews:
    def __init__(self, accepted: Accepted | None, answer_s: float, idle_s: float) -> None:
        self._accepted = accepted
        self._answer_s = answer_s
        self._idle_s = idle_s
        self._body_bytes = FairShares(BODIES_BYTES)
        self._small, self._large = FairTurns(), FairTurns()
        self._thread = ThreadPoolExecutor(1, "review")

    async def handle(self, request: web.Request, *, mutating: bool) -> web.Response:
        if self._accepted is not None and not self._accepted(request):
            raise web.HTTPUnauthorized(text="show the front proxy's certificate")
        source = request.remote or ""
        try:
            async with asyncio.timeout(self._answer_s), self._body(request, source) as body:
                result = await self._answered(body, source, mutating)
        except TimeoutError:
            message = f"no complete review within {self._answer_s:g} s, or a pause in its body"
            raise web.HTTPRequestTimeout(text=message) from None
        except (ValueError, RecursionError) as error:
            _log.warning("review refused: %.200s", error, extra={"code": "bad_review"})
            raise web.HTTPBadRequest(text=f"{error!s:.200}") from None
        return web.json_response(result)

    async def _answered(self, body: bytes, source: str, mutating: bool) -> Any:
        review_text = body.decode()
        check_values(review_text, MAX_VALUES)
        review = json.loads(review_text)
        namespace = text(part(review, "request"), "namespace")
        if len(body) <= LARGE_BYTES and values_at_most(review_text) <= LARGE_VALUES:
            async with self._small.turn(source, namespace):
                return answer(review, mutating=mutating)
        async with self._large.turn(source, namespace):
            # Wait for the thread's answer even after a cancel, because the turn must last until
            # then.
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._thread, lambda: answer(review, mutating=mutating))
            return await to_end(work)

    @asynccontextmanager
    async def _body(self, request: web.Request, source: str) -> AsyncIterator[bytes]:
        """Read the body within the bounds and yield it. At the end, release its share of memory."""
        body = bytearray()
        try:
            if (request.content_length or 0) > MAX_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_BYTES, request.content_length or 0)
            while data := await self._next_part(request):
                if not self._body_bytes.take(source, len(data)):
                    raise web.HTTPServiceUnavailable(text="too many reviews at once; retry")
                body += data
                if len(body) > MAX_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BYTES, len(body))
            yield bytes(body)
        finally:
            if body:
                self._body_bytes.release(source, len(body))

    async def _next_part(self, request: web.Request) -> bytes:
        """Return the next chunk of the body; empty at the end of the body.

        Raises:
            TimeoutError: no chunk arrived in time.
        """
        async with asyncio.timeout(self._idle_s):
            return await request.content.readany()
