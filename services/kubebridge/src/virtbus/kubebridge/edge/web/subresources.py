"""Handler of the verbs of the aggregated API: authorizes, reads objects, executes effects."""

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from virtbus.kubebridge.core.api import guest_answers
from virtbus.kubebridge.core.api.access import SubresourceTarget, target_of
from virtbus.kubebridge.core.api.subresources import BY_NAME, EXPAND, answer, expanded
from virtbus.kubebridge.core.objects.bounds import check_values
from virtbus.kubebridge.core.objects.status_errors import (
    Refusal,
    bad_request,
    conflict,
    not_found,
    of_http,
)
from virtbus.kubebridge.core.objects.unstructured import at
from virtbus.kubebridge.core.runtime import controller as kinds
from virtbus.kubebridge.core.runtime.subresource_effects import (
    KINDS,
    VM,
    AskGuest,
    BusVerb,
    Effect,
    Give,
    GuestStream,
    JsonPatch,
    SubresourceCall,
)
from virtbus.kubebridge.edge.cluster import KubernetesApi, StatusError
from virtbus.kubebridge.edge.web.authorization import Authorization
from virtbus.kubebridge.edge.web.error_middleware import RefusedError
from virtbus.kubebridge.edge.web.guest_proxy import Guests
from virtbus.schemas.yaml_text import read_yaml

OPTIONS_BYTES_MAX = 4096
OPTIONS_VALUES_MAX = 256
"""Maximum number of values in a verb's options. KubeVirt's options have at most ten."""
OBJECT_BYTES_MAX = 3 * 1024 * 1024
"""Largest object, as in the API server."""
OBJECT_VALUES_MAX = 20_000
"""Maximum number of JSON values in an object. A bus message has the same limit, so a larger object
cannot become a VM. Parsing takes 0.1 s at most."""
MEANWHILE = "the object has been modified; please apply your changes to the latest version"
PLACES: dict[str, tuple[kinds.Kind, str]] = {
    "vm": (kinds.VM, ""),
    "vm/status": (kinds.VM, "status"),
    "vmi": (kinds.VMI, ""),
}
GUEST_ANSWERS = {
    "guestosinfo": guest_answers.os_info,
    "userlist": guest_answers.users,
    "filesystemlist": guest_answers.filesystems,
}


class Subresources:
    """The verbs of VMs and VMIs."""

    def __init__(self, cluster: KubernetesApi, guests: Guests, asking: Authorization) -> None:
        self._cluster = cluster
        self._guests = guests
        self._asking = asking

    def routes(self) -> list[web.RouteDef]:
        """Return one route for all verbs. `core/api/subresources.py` has the table of the verbs."""
        return [web.route("*", "/apis/{rest:.*}", self._handle)]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        user = self._asking.user(request)
        target = target_of(request.path)
        if target is None:
            raise RefusedError(of_http(404, "the server could not find the requested resource"))
        await self._asking.may(user, request.method, target)
        if target.resource == EXPAND:
            return await _expand(request, target)
        call = await self._call(request, target)
        outcome = answer(call)
        if isinstance(outcome, Refusal):
            raise RefusedError(outcome)
        found: Any = None
        for effect in outcome:
            if isinstance(effect, GuestStream):
                return await self._guests.stream(request, effect, user.name)
            found = await self._do(call, effect, target.namespace)
        if found is not None:
            return web.json_response(found)
        return web.Response(status=BY_NAME[call.resource, call.verb].success)

    async def _do(self, call: SubresourceCall, effect: Effect, namespace: str) -> Any:
        """Execute one effect. Return an object for the answer, or None.

        Raises:
            RefusedError: the object is gone, or was changed since it was read.
            StatusError, VirtbusError, BusError: the effect was refused.
        """
        match effect:
            case JsonPatch():
                await self._patch(call, effect, namespace)
            case BusVerb():
                await self._guests.ask(effect.verb, effect.uid, effect.timeout_s)
            case AskGuest():
                return GUEST_ANSWERS[call.verb](
                    await self._guests.tell(effect.uid, effect.questions)
                )
            case Give():
                return effect.what
            case GuestStream():
                raise AssertionError(effect)
        return None

    async def _patch(self, call: SubresourceCall, patch: JsonPatch, namespace: str) -> None:
        kind, sub = PLACES[patch.of]
        name, steps, dry_run = KINDS[kind.plural], list(patch.operations), call.dry_run
        try:
            await self._cluster.patch(
                kind, call.name, steps, namespace, sub, "json", dry_run=dry_run
            )
        except StatusError as answer:
            if answer.code == 404:
                raise RefusedError(not_found(name, call.name)) from None
            failed_test = answer.code == 422 and not at(answer.status, "details", "causes")
            if answer.code == 409 or failed_test:
                raise RefusedError(conflict(name, call.name, MEANWHILE)) from None
            raise

    async def _call(self, request: web.Request, target: SubresourceTarget) -> SubresourceCall:
        """Return the call. Its objects are read only for a supported verb with the right method."""
        verb = BY_NAME.get((target.resource, target.subresource))
        vm = vmi = None
        options: dict[str, Any] = {}
        if verb is not None and not verb.missing and verb.method == request.method:
            options = await _options(request, target)
            if target.resource == VM:
                vm = await self._cluster.get(kinds.VM, target.name, target.namespace)
            vmi = await self._cluster.get(kinds.VMI, target.name, target.namespace)
        return SubresourceCall(
            request.method, target.resource, target.subresource, target.name, vm, vmi, options
        )


async def _expand(request: web.Request, target: SubresourceTarget) -> web.StreamResponse:
    if request.method != "PUT":
        raise RefusedError(of_http(405, f"{EXPAND} needs the method PUT"))
    outcome = expanded(await _body(request, OBJECT_BYTES_MAX, _object), target.namespace)
    if isinstance(outcome, Refusal):
        raise RefusedError(outcome)
    return web.json_response(outcome)


async def _options(request: web.Request, target: SubresourceTarget) -> dict[str, Any]:
    if target.subresource == "portforward":
        port, protocol, *more = *target.rest, "", ""
        if any(more):
            raise RefusedError(of_http(404, "the server could not find the requested resource"))
        return {"port": port, "protocol": protocol}
    if request.method != "PUT":
        return {}
    found = await _body(request, OPTIONS_BYTES_MAX, _json_or_yaml)
    if not isinstance(found, dict):
        raise RefusedError(bad_request("the body is not an object"))
    return found


def _object(text: str) -> Any:
    check_values(text, OBJECT_VALUES_MAX)
    return json.loads(text)


def _json_or_yaml(text: str) -> Any:
    """Parse options of bounded size: 3 MB of YAML would block the event loop for a minute."""
    if text.lstrip().startswith("{"):
        return json.loads(text)
    return read_yaml(text, max_values=OPTIONS_VALUES_MAX)


async def _body(request: web.Request, bytes_max: int, read: Callable[[str], Any]) -> Any:
    """Read and parse the body. An empty body counts as an empty object.

    Raises:
        RefusedError: 400, the body cannot be parsed; 413, the body is too long.
    """
    body = bytearray()
    async for data in request.content.iter_any():
        body += data
        if len(body) > bytes_max:
            raise RefusedError(of_http(413, f"the body is longer than {bytes_max} bytes"))
    try:
        text = body.decode()
        return read(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        why = f"Can not unmarshal Request body to struct, error: {error!s:.200}"
        raise RefusedError(bad_request(why)) from None
