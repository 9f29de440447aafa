"""Finds the target of a request for a subresource, and builds its access review and refusal."""

from typing import Any, NamedTuple

from virtbus.kubebridge.core.api.front_proxy import User
from virtbus.kubebridge.core.api.subresources import EXPAND, GROUP, VERSIONS
from virtbus.kubebridge.core.objects.status_errors import Refusal
from virtbus.kubebridge.core.runtime.controller import ACCESS_REVIEW
from virtbus.kubebridge.core.runtime.subresource_effects import VM, VMI

ACTS = {"GET": "get", "PUT": "update", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
"""RBAC verbs by HTTP method."""


class SubresourceTarget(NamedTuple):
    """A subresource of an object, or of a namespace if `name` is empty.

    `subresource` is the subresource's name in RBAC. `rest` has the remaining parts of the path.
    """

    version: str
    namespace: str
    resource: str
    name: str = ""
    subresource: str = ""
    rest: tuple[str, ...] = ()


def target_of(path: str) -> SubresourceTarget | None:
    """Return the target of `/apis/<group>/<version>/…`; None if the path names no subresource.

    The port and protocol of `portforward` go into `rest`, not into `subresource`.
    """
    match path.split("/"):
        case ["", "apis", group, version, "namespaces", namespace, resource, *more] if (
            group == GROUP and version in VERSIONS and namespace
        ):
            pass
        case _:
            return None
    match more:
        case [] if resource == EXPAND:
            return SubresourceTarget(version, namespace, resource)
        case [name, "portforward", *rest] if resource in {VM, VMI} and name:
            return SubresourceTarget(version, namespace, resource, name, "portforward", tuple(rest))
        case [name, _, *_] if resource in {VM, VMI} and name:
            return SubresourceTarget(version, namespace, resource, name, "/".join(more[1:]))
        case _:
            return None


def review(user: User, method: str, target: SubresourceTarget) -> dict[str, Any]:
    """Return the SubjectAccessReview for a request of `user`."""
    attributes = {
        "group": GROUP,
        "version": target.version,
        "namespace": target.namespace,
        "resource": target.resource,
        "subresource": target.subresource,
        "name": target.name,
        "verb": ACTS.get(method, method.lower()),
    }
    spec = {
        "user": user.name,
        "groups": list(user.groups),
        "resourceAttributes": {key: value for key, value in attributes.items() if value},
        **({"uid": user.uid} if user.uid else {}),
        **({"extra": {key: list(values) for key, values in user.extra}} if user.extra else {}),
    }
    return {"apiVersion": ACCESS_REVIEW.api_version, "kind": ACCESS_REVIEW.kind, "spec": spec}


def forbidden(user: User, method: str, target: SubresourceTarget, reason: str = "") -> Refusal:
    """Return a 403 with Kubernetes' wording, and `reason` at its end."""
    what = f"{target.resource}/{target.subresource}" if target.subresource else target.resource
    named = f' "{target.name}"' if target.name else ""
    why = (
        f'{target.resource}.{GROUP}{named} is forbidden: User "{user.name}" cannot '
        f'{ACTS.get(method, method.lower())} resource "{what}" in API group "{GROUP}" '
        f'in the namespace "{target.namespace}"'
    )
    full = f"{why}: {reason}" if reason else why
    return Refusal(403, "Forbidden", full, target.resource, target.name)
