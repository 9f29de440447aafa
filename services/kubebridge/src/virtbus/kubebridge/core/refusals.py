"""Kubernetes' Status objects: how the aggregated API says no (apimachinery, api/errors)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from virtbus.kubebridge.core.causes import Cause
from virtbus.schemas.errors import ErrorBody

GROUP = "kubevirt.io"
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Gone",
    413: "RequestEntityTooLarge",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "ServiceUnavailable",
    504: "Timeout",
}
"""Kubernetes' word for each code (apimachinery, StatusReason)."""


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


def unauthorized() -> Refusal:
    """401: nobody whom we believe says who it is."""
    return of_http(401, "Unauthorized")


def unavailable(why: str) -> Refusal:
    """503: the same may do later."""
    return of_http(503, why)


def of_http(code: int, why: str) -> Refusal:
    """Where all that is known is a code."""
    return Refusal(code, REASONS.get(code, "Unknown"), why)


def of_bus(error: ErrorBody) -> Refusal:
    """What the bus refused; its codes are HTTP's."""
    return of_http(error.code, error.message)


def not_implemented(what: str) -> Refusal:
    """501, with the name of what is missing."""
    return Refusal(501, "NotImplemented", what)


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> Refusal:
    """422 of a webhook: all problems in the message, each with its field."""
    told = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
    return Refusal(422, "Invalid", told, kind, name, tuple(causes))
