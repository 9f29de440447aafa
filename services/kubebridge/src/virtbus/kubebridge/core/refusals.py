"""Kubernetes' Status objects: how the aggregated API says no (apimachinery, api/errors)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from virtbus.kubebridge.core.causes import Cause

GROUP = "kubevirt.io"


class Refusal(NamedTuple):
    """An answer that is none: code and reason go together."""

    code: int
    reason: str
    message: str
    kind: str = ""
    name: str = ""
    causes: tuple[Cause, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The Status, as kubectl and virtctl print it."""
        details: dict[str, Any] = {}
        if self.kind:
            details = {"name": self.name, "group": GROUP, "kind": self.kind}
        if self.causes:
            details["causes"] = [cause.plain() for cause in self.causes]
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
            **({"details": details} if details else {}),
        }


def conflict(kind: str, name: str, why: str) -> Refusal:
    """409: the object's state does not allow it."""
    message = f'Operation cannot be fulfilled on {kind}.{GROUP} "{name}": {why}'
    return Refusal(409, "Conflict", message, kind, name)


def not_found(kind: str, name: str) -> Refusal:
    """404."""
    return Refusal(404, "NotFound", f'{kind}.{GROUP} "{name}" not found', kind, name)


def bad_request(why: str) -> Refusal:
    """400: the request says what makes no sense, or nothing that it could go on with."""
    return Refusal(400, "BadRequest", why)


def not_implemented(what: str) -> Refusal:
    """501, with the name of what is missing."""
    return Refusal(501, "NotImplemented", what)


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> Refusal:
    """422 of a webhook: all problems in the message, each with its field."""
    told = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
    return Refusal(422, "Invalid", told, kind, name, tuple(causes))
