"""Builds the discovery and OpenAPI documents of the aggregated API from the table of verbs."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from virtbus.kubebridge.core.api.subresources import EXPAND, GROUP, VERBS, VERSIONS
from virtbus.kubebridge.core.runtime.subresource_effects import Verb

KUBEVIRT = "v1.9.0"
"""The version of KubeVirt whose API is served. virtctl warns if its own minor version differs."""
GROUP_LIST = "APIGroupDiscoveryList"
AGGREGATED = f"application/json;g=apidiscovery.k8s.io;v=v2;as={GROUP_LIST}"
"""The content type of `aggregated`. Clients name it in their Accept header."""


def version(release: str) -> dict[str, Any]:
    """Return the body of `/version` in KubeVirt's format; `release` is the version of virtbus."""
    return {
        "gitVersion": KUBEVIRT,
        "gitCommit": f"virtbus-{release}",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "none",
        "compiler": "none",
        "platform": "linux/amd64",
    }


def api_group() -> dict[str, Any]:
    """Return the body of `GET /apis/subresources.kubevirt.io`."""
    listed = [{"groupVersion": f"{GROUP}/{one}", "version": one} for one in VERSIONS]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "versions": listed,
        "preferredVersion": listed[0],
    }


def api_groups() -> dict[str, Any]:
    """Return the body of `GET /apis`."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [api_group()]}


def api_resources(version: str) -> dict[str, Any]:
    """Return the body of `GET /apis/subresources.kubevirt.io/<version>`.

    The body lists all verbs, even verbs that virtbus does not support.
    """
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{GROUP}/{version}",
        "resources": [
            _resource(EXPAND, "update"),
            *(_resource(f"{verb.resource}/{verb.name}", verb.access) for verb in VERBS),
        ],
    }


def _resource(name: str, access: str) -> dict[str, Any]:
    return {
        "name": name,
        "singularName": "",
        "namespaced": True,
        "kind": "",
        "verbs": [access],
    }


def aggregated() -> dict[str, Any]:
    """Return the body of `GET /apis` for clients that accept `AGGREGATED`, with all resources."""
    return {
        "kind": GROUP_LIST,
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": [
            {
                "metadata": {"name": GROUP},
                "versions": [
                    {"version": one, "freshness": "Current", "resources": list(_discovered())}
                    for one in VERSIONS
                ],
            }
        ],
    }


def _discovered() -> Iterator[dict[str, Any]]:
    """Yield `expand-vm-spec`, then VMs and VMIs with their subresources.

    VMs and VMIs themselves have no verbs in this group.
    """
    yield {"resource": EXPAND, "scope": "Namespaced", "singularResource": "", "verbs": ["update"]}
    by_resource = sorted(VERBS, key=lambda verb: verb.resource)
    for resource, verbs in groupby(by_resource, key=lambda verb: verb.resource):
        yield {
            "resource": resource,
            "scope": "Namespaced",
            "singularResource": "",
            "verbs": [],
            "subresources": [{"subresource": verb.name, "verbs": [verb.access]} for verb in verbs],
        }


# --- OpenAPI, versions 2 and 3 -----------------------------------------------------------------
JSON = "application/json"
_WORDS = {"type": "string"}
_DRY_RUN = {"dryRun": {"type": "array", "items": _WORDS}}
OPTIONS: dict[str, dict[str, Any]] = {
    "start": {"paused": {"type": "boolean"}, **_DRY_RUN},
    "stop": {"gracePeriod": {"type": "integer", "format": "int64"}, **_DRY_RUN},
    "restart": {"gracePeriodSeconds": {"type": "integer", "format": "int64"}, **_DRY_RUN},
    "pause": _DRY_RUN,
    "unpause": _DRY_RUN,
}
"""Fields of request bodies by verb. Other verbs have no fields."""


class _Operation(NamedTuple):
    """One operation of the API, independent of the version of OpenAPI."""

    path: str
    method: str
    id: str
    about: str
    code: int = 200
    body: dict[str, Any] | None = None


def _operations(version: str) -> list[_Operation]:
    base = f"/apis/{GROUP}/{version}"
    found = [
        _Operation(f"{base}/", "get", f"{version}Resources", "List the API's resources."),
        _Operation(
            f"{base}/version",
            "get",
            f"{version}Version",
            "Return the version of KubeVirt's API that is served.",
        ),
        _Operation(
            f"{base}/namespaces/{{namespace}}/{EXPAND}",
            "put",
            f"{version}ExpandSpec",
            "Return a VirtualMachine with its instance type and preference filled in.",
            body={"type": "object"},
        ),
    ]
    for verb in VERBS:
        path = f"{base}/namespaces/{{namespace}}/{verb.resource}/{{name}}/{verb.name}"
        ports = ("/{port}", "/{port}/{protocol}") if verb.name == "portforward" else ("",)
        found += [_operation(version, verb, path + more) for more in ports]
    return found


def _operation(version: str, verb: Verb, path: str) -> _Operation:
    short = "vm" if verb.resource == "virtualmachines" else "vmi"
    more = "WithProtocol" if path.endswith("/{protocol}") else ""
    return _Operation(
        path,
        verb.method.lower(),
        f"{version}{short}-{verb.name.replace('/', '-')}{more}",
        verb.missing or f"{verb.name} of a {verb.resource.removesuffix('s')}.",
        verb.success,
        {"type": "object", "properties": OPTIONS.get(verb.name, {})}
        if verb.method == "PUT"
        else None,
    )


def document_v2() -> dict[str, Any]:
    """Return the body of `GET /openapi/v2`: all versions of the API in one document."""
    paths = {}
    for each in (one for version in VERSIONS for one in _operations(version)):
        body = {"in": "body", "name": "body", "schema": each.body}
        more = {"parameters": [body]} if each.body is not None else {}
        paths[each.path] = _path(each, _WORDS, consumes=[JSON], produces=[JSON], **more)
    return {"swagger": "2.0", "info": _info(), "paths": paths, "definitions": {}}


def document_v3(version: str) -> dict[str, Any]:
    """Return the body of `GET /openapi/v3/apis/subresources.kubevirt.io/<version>`."""
    paths = {}
    for each in _operations(version):
        body = {"requestBody": {"content": {JSON: {"schema": each.body}}}}
        more = body if each.body is not None else {}
        paths[each.path] = _path(each, {"schema": _WORDS}, **more)
    return {"openapi": "3.0.0", "info": _info(), "paths": paths, "components": {}}


def _path(each: _Operation, parameter: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {200: "OK", 202: "Accepted", 101: "Switching to a websocket"}[each.code]
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    return {
        each.method: {
            "operationId": each.id,
            "description": each.about,
            "responses": {
                str(each.code): {"description": about},
                "401": {"description": "Unauthorized"},
            },
            **more,
        },
        "parameters": [
            {"in": "path", "name": name, "required": True, **parameter} for name in names
        ],
    }


def index_v3() -> dict[str, Any]:
    """Return the body of `GET /openapi/v3`: the addresses of the documents."""
    names = [f"apis/{GROUP}/{version}" for version in VERSIONS]
    return {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in names}}


def _info() -> dict[str, str]:
    return {"title": "KubeVirt's subresources, by virtbus", "version": KUBEVIRT}
