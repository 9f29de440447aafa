"""The webhooks: admission reviews of the API server, answered (ADR 0025).

Whoever reaches the port may ask, for API servers show webhooks no certificate unless told to:
nothing is changed by an answer, and no question costs more than these bounds.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from virtbus.kubebridge.core.admission import answer

MAX_BYTES = 8 * 1024**2
"""Of a review; it holds an object twice at the most, of 3 MiB each at the API server's most."""
READ_S = 10.0
"""Until a review is answered; API servers wait as long for its answer (`timeoutSeconds`)."""
AT_ONCE = 8
"""Reviews that are held in memory; others wait."""
LARGE_BYTES = 64 * 1024
"""A review of more may take seconds: beside all else, and one at a time."""
MUTATE, VALIDATE = "/admission/mutate", "/admission/validate"
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.Response]]


def routes(read_s: float = READ_S) -> list[web.RouteDef]:
    """The two webhooks, for the server to add."""
    room, beside = asyncio.Semaphore(AT_ONCE), asyncio.Lock()
    return [
        web.post(path, _webhook(room, beside, read_s, mutating=path == MUTATE))
        for path in (MUTATE, VALIDATE)
    ]


def _webhook(
    room: asyncio.Semaphore, beside: asyncio.Lock, read_s: float, *, mutating: bool
) -> Handler:
    def answered(body: bytes) -> web.Response:
        return web.json_response(answer(json.loads(body), mutating=mutating))

    async def handle(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(read_s), room:
                body = await _read(request)
                if len(body) <= LARGE_BYTES:
                    return answered(body)
                async with beside:
                    return await asyncio.to_thread(answered, body)
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"no review within {read_s:g} s") from None
        except (ValueError, RecursionError) as error:
            _log.warning("a review was refused: %.200s", error)
            raise web.HTTPBadRequest(text=f"{error!s:.200}") from None

    return handle


async def _read(request: web.Request) -> bytes:
    """The body, as long as it is no longer than a review may be."""
    body = bytearray()
    if (request.content_length or 0) <= MAX_BYTES:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > MAX_BYTES:
                break
        else:
            return bytes(body)
    raise web.HTTPRequestEntityTooLarge(MAX_BYTES, request.content_length or len(body))
