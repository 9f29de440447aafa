"""What parts of an object are made of: documented fields, JSON's types and Kubernetes' own."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """An object within an object; its docstring is what `kubectl explain` shows."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def said(text: str, *, max_length: int | None = None, **schema: Any) -> Any:
    """A field that may be absent, what it means, and more keywords of its schema."""
    extra = schema or None
    return Field(default=None, description=text, max_length=max_length, json_schema_extra=extra)


def must(text: str, **schema: Any) -> Any:
    """A field that must be given."""
    # Even None would hide the keywords of its type.
    return Field(description=text, json_schema_extra=schema) if schema else Field(description=text)


QUANTITY = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
_EITHER = {"type": None, "anyOf": None, "x-kubernetes-int-or-string": True}

Quantity = Annotated[int | str, Field(json_schema_extra={**_EITHER, "pattern": QUANTITY})]
"""`4G`, `512Mi`, `1500m`, or a plain number."""
IntOrString = Annotated[int | str, Field(json_schema_extra=_EITHER)]
Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
UInt32 = Annotated[int, Field(ge=0, le=4294967295, json_schema_extra={"format": "int64"})]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, as Kubernetes writes it."""
_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
Anything = Annotated[dict[str, Any], Field(json_schema_extra=_OPEN)]
"""An object whose fields are not ours to name; it may be nested as deep as API servers read."""


class Empty(Part):
    """Asked for by being there; it has no fields."""


class Switch(Part):
    """On or off."""

    enabled: bool | None = said("On (the default where the switch itself is given) or off.")


class OwnerReference(Part):
    """What an object belongs to."""

    apiVersion: str | None = said("Its version.")
    blockOwnerDeletion: bool | None = said("It waits for the object to go.")
    controller: bool | None = said("It makes the object.")
    kind: str | None = said("Its kind.")
    name: str | None = said("Its name.")
    uid: str | None = said("Its uid.")


class Metadata(Part):
    """An object's, of which labels and annotations count: the others are Kubernetes' own."""

    annotations: dict[str, str] | None = said("Notes.", nullable=True)
    creationTimestamp: Time | None = said("Not looked at.", nullable=True)
    deletionGracePeriodSeconds: Int64 | None = said("Not looked at.", nullable=True)
    deletionTimestamp: Time | None = said("Not looked at.", nullable=True)
    finalizers: list[str] | None = said("Not looked at.", nullable=True)
    generateName: str | None = said("Not looked at.")
    generation: Int64 | None = said("Not looked at.")
    labels: dict[str, str] | None = said("What others select it by.", nullable=True)
    name: str | None = said("Not looked at.")
    namespace: str | None = said("Not looked at.")
    ownerReferences: list[OwnerReference] | None = said("Not looked at.", nullable=True)
    resourceVersion: str | None = said("Not looked at.")
    selfLink: str | None = said("Not looked at.")
    uid: str | None = said("Not looked at.")
