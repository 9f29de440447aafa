"""Every refusal as a Status object, whoever made it: the core, the API server, the bus, aiohttp."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from virtbus.bus.ports import BusError
from virtbus.kubebridge.core.refusals import Refusal, of_bus, of_http, unavailable
from virtbus.kubebridge.edge.cluster import Answer
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RefusedError(Exception):
    """A refusal on its way out."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refused(refusal: Refusal) -> web.Response:
    """The answer of a refusal."""
    return web.json_response(refusal.plain(), status=refusal.code)


@web.middleware
async def in_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What a handler raises becomes a Status, as long as nothing was answered."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # who asked is gone; aiohttp knows
    except Exception as error:
        refusal = _said(error)
        if refusal is None:
            log.exception(
                "%s %s failed", request.method, request.path, extra={"code": "web_failed"}
            )
            refusal = of_http(500, "Internal error occurred; the bridge's log says more")
        return refused(refusal)


def _said(error: Exception) -> Refusal | None:
    match error:
        case RefusedError():
            return error.refusal
        case Answer():
            return _passed_on(error)
        case VirtbusError():
            return of_bus(error.body)
        case BusError():
            return unavailable(str(error))
        case web.HTTPException():
            return of_http(error.status, error.reason)
        case _:
            return None


def _passed_on(answer: Answer) -> Refusal:
    """What the API server answered to us; its load and its troubles pass, and our login's."""
    if answer.passing or answer.code == 401:
        return unavailable(answer.message)
    return Refusal(answer.code, answer.reason or "InternalError", answer.message)
