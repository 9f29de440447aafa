"""Problems of a manifest, as in the `details.causes` of a Kubernetes Status."""

from enum import StrEnum
from typing import Any, NamedTuple


class Reason(StrEnum):
    """The causes that Kubernetes knows (meta/v1, CauseType)."""

    REQUIRED = "FieldValueRequired"
    INVALID = "FieldValueInvalid"
    NOT_SUPPORTED = "FieldValueNotSupported"
    DUPLICATE = "FieldValueDuplicate"
    NOT_FOUND = "FieldValueNotFound"
    FORBIDDEN = "FieldValueForbidden"


class Cause(NamedTuple):
    """One problem: the field's path as KubeVirt writes it, and what to write instead."""

    field: str
    message: str
    reason: Reason = Reason.INVALID

    def plain(self) -> dict[str, Any]:
        """As in `details.causes`."""
        return {"reason": str(self.reason), "message": self.message, "field": self.field}
