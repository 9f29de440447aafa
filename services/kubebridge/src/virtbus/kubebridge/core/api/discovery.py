"""Builds the discovery documents of the aggregated API: groups, versions and resources."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from virtbus.kubebridge.core.api.subresources import EXPAND, GROUP, VERBS, VERSIONS

KUBEVIRT = "v1.9.0"
"""The version of KubeVirt whose API is served. virtctl warns if its own minor version differs."""
GROUP_LIST = "APIGroupDiscoveryList"
AGGREGATED = f"application/json;g=apidiscovery.k8s.io;v=v2;as={GROUP_LIST}"
"""The content type of `aggregated`. Clients name it in their Accept header."""


def version(release: str) -> dict[str, Any]:
    """Return the body of `/version`, as KubeVirt has it. `release` is the version of virtbus."""
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

    It lists each verb, including those that are not supported yet.
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
    """Yield the resources with their subresources. The resources have no verbs in this group."""
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
