"""Requests that need no authorization: discovery, OpenAPI, versions, health."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from virtbus.kubebridge.core.api import discovery
from virtbus.kubebridge.core.api.subresources import GROUP, VERSIONS
from virtbus.kubebridge.edge.web.authorization import Authorization
from virtbus.kubebridge.edge.web.error_middleware import Handler

NO_GUESTFS = "guestfs is not supported yet: there are no pods on volumes"


def documents(asking: Authorization, release: str) -> list[web.RouteDef]:
    """Return the routes of the documents. Only the front proxy may read `/apis` and below it."""
    apis: dict[str, Callable[[], Mapping[str, Any]]] = {
        f"/apis/{GROUP}": discovery.api_group,
    }
    for one in VERSIONS:
        base = f"/apis/{GROUP}/{one}"
        apis[base] = apis[f"{base}/"] = partial(discovery.api_resources, one)
        apis[f"{base}/version"] = partial(discovery.version, release)
        apis[f"{base}/healthz"] = dict
    return [
        web.get("/apis", _by_front_proxy(asking, _apis)),
        web.get("/apis/", _by_front_proxy(asking, _apis)),
        *(web.get(path, _by_front_proxy(asking, _json(what))) for path, what in apis.items()),
        *(
            web.get(f"/apis/{GROUP}/{one}/guestfs", _by_front_proxy(asking, _guestfs))
            for one in VERSIONS
        ),
        web.get("/openapi/v2", _json(discovery.document_v2)),
        web.get("/openapi/v3", _json(discovery.index_v3)),
        *(
            web.get(f"/openapi/v3/apis/{GROUP}/{one}", _json(partial(discovery.document_v3, one)))
            for one in VERSIONS
        ),
    ]


def health(ready: Callable[[], str]) -> list[web.RouteDef]:
    """Return the routes of `/healthz`, which always succeeds, and `/readyz`.

    `ready` returns the reason why the bridge is not ready, or an empty string.
    """

    async def is_ready(_request: web.Request) -> web.Response:
        why = ready()
        return web.Response(text=why or "ok", status=503 if why else 200)

    async def is_there(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    return [web.get("/healthz", is_there), web.get("/readyz", is_ready)]


def _by_front_proxy(asking: Authorization, handler: Handler) -> Handler:
    async def asked(request: web.Request) -> web.StreamResponse:
        asking.user(request)
        return await handler(request)

    return asked


def _json(what: Callable[[], Mapping[str, Any]]) -> Handler:
    async def tell(_request: web.Request) -> web.StreamResponse:
        return web.json_response(what())

    return tell


async def _apis(request: web.Request) -> web.StreamResponse:
    accepted = request.headers.get("Accept", "")
    if discovery.AGGREGATED not in accepted.replace(" ", ""):
        return web.json_response(discovery.api_groups())
    body = json.dumps(discovery.aggregated()).encode()
    return web.Response(body=body, headers={"Content-Type": discovery.AGGREGATED})


async def _guestfs(_request: web.Request) -> web.StreamResponse:
    return web.Response(text=NO_GUESTFS, status=501)  # virtctl shows only plain text
