"""Middleware that turns errors of the core, the API server, the bus and aiohttp into Statuses."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from virtbus.bus.errors import BusError
from virtbus.kubebridge.core.objects.status_errors import REASONS, Refusal, of_http
from virtbus.kubebridge.edge.cluster import StatusError
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RefusedError(Exception):
    """Carries a refusal to the middleware."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@web.middleware
async def in_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a handler's exception with a Status. aiohttp handles a ConnectionError."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client is gone
    except Exception as error:
        refusal = _refusal_for(error)
        if refusal is None:
            log.exception(
                "%s %s failed", request.method, request.path, extra={"code": "web_failed"}
            )
            refusal = of_http(500, "Internal error occurred; see the bridge's log")
        if request.writer.output_size:
            raise  # a response has begun, so aiohttp must close the connection
        return web.json_response(refusal.plain(), status=refusal.code)


def _refusal_for(error: Exception) -> Refusal | None:
    """Return the refusal for an error; None for an unexpected error.

    Temporary errors of the API server become 503. Its refusal of the bridge's own login does, too.
    """
    match error:
        case RefusedError():
            return error.refusal
        case StatusError():
            transient = error.transient or error.code == 401  # the bridge's own login failed
            code, reason = (503, REASONS[503]) if transient else (error.code, error.reason)
            return Refusal(code, reason or "InternalError", error.message)
        case VirtbusError():
            return of_http(error.body.code, error.body.message)
        case BusError():
            return of_http(503, str(error))
        case web.HTTPException():
            default = f"{error.status}: {error.reason}"
            explained = error.text not in (None, default)
            return of_http(error.status, (error.text if explained else None) or error.reason)
        case _:
            return None
