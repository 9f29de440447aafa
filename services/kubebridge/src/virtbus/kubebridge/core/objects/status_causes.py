"""Problems of a manifest, as in the `details.causes` of a Kubernetes Status."""

from enum import StrEnum
from typing import Any, NamedTuple


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
        """Return the cause as in `details.causes`."""
        return {"reason": str(self.reason), "message": self.message, "field": self.field}
