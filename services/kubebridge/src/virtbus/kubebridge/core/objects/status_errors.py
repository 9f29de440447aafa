"""Builds Kubernetes' Status objects for refusals (apimachinery, api/errors)."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

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
"""Kubernetes' reason for each code (apimachinery, StatusReason)."""


class Reason(StrEnum):
    """Reasons of a cause (meta/v1, CauseType)."""

    REQUIRED = "FieldValueRequired"
    INVALID = "FieldValueInvalid"
    NOT_SUPPORTED = "FieldValueNotSupported"
    DUPLICATE = "FieldValueDuplicate"
    NOT_FOUND = "FieldValueNotFound"


class Cause(NamedTuple):
    """One problem: the field's path as KubeVirt writes it, and a message with the next step."""

    field: str
    message: str
    reason: Reason = Reason.INVALID

    def plain(self) -> dict[str, Any]:
        return {"reason": str(self.reason), "message": self.message, "field": self.field}


class Refusal(NamedTuple):
    """A refusal of a request. `reason` is Kubernetes' name for `code`, an HTTP code."""

    code: int
    reason: str
    message: str
    kind: str = ""
    name: str = ""
    causes: tuple[Cause, ...] = ()

    def plain(self) -> dict[str, Any]:
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
    """Return a 409: the object's state does not allow the call."""
    message = f'Operation cannot be fulfilled on {kind}.{GROUP} "{name}": {why}'
    return Refusal(409, "Conflict", message, kind, name)


def not_found(kind: str, name: str) -> Refusal:
    """Return a 404."""
    return Refusal(404, "NotFound", f'{kind}.{GROUP} "{name}" not found', kind, name)


def bad_request(why: str) -> Refusal:
    """Return a 400: the request is invalid or incomplete."""
    return of_http(400, why)


def of_http(code: int, why: str) -> Refusal:
    """Return the refusal for an HTTP code."""
    return Refusal(code, REASONS.get(code, "Unknown"), why)


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> Refusal:
    """Return the 422 of a webhook, with all problems and their fields in the message."""
    message = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
    return Refusal(422, "Invalid", message, kind, name, tuple(causes))
