"""Defines building blocks of the models: documented fields, and types of Kubernetes."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """Base class of the models. `kubectl explain` shows the docstring of each subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def said(text: str, *, max_length: int | None = None, **schema: Any) -> Any:
    """Declare an optional field with a description and additional schema keywords."""
    extra = schema or None
    return Field(default=None, description=text, max_length=max_length, json_schema_extra=extra)


def must(text: str, **schema: Any) -> Any:
    """Declare a required field with a description and additional schema keywords."""
    # Pass no empty dict: pydantic would then drop the schema keywords of the field's type.
    return Field(description=text, json_schema_extra=schema) if schema else Field(description=text)


QUANTITY = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
_EITHER = {"type": None, "anyOf": None, "x-kubernetes-int-or-string": True}

Quantity = Annotated[int | str, Field(json_schema_extra={**_EITHER, "pattern": QUANTITY})]
"""A number with a unit, such as `4G`, `512Mi` or `1500m`, or a plain number."""
IntOrString = Annotated[int | str, Field(json_schema_extra=_EITHER)]
Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
UInt32 = Annotated[int, Field(ge=0, le=4294967295, json_schema_extra={"format": "int64"})]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""A time in RFC 3339, as Kubernetes writes it."""
_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
Anything = Annotated[dict[str, Any], Field(json_schema_extra=_OPEN)]
"""An object whose fields the schema does not name."""


class Empty(Part):
    """An object without fields. Its presence turns the feature on."""


class Switch(Part):
    """Turns a feature on or off."""

    enabled: bool | None = said(
        "Turns the feature on or off. The default is true if this object is given."
    )


class OwnerReference(Part):
    """A reference to the object that owns this one."""

    apiVersion: str | None = said("API version of the owner.")
    blockOwnerDeletion: bool | None = said(
        "If true, foreground deletion of the owner waits until this object is gone."
    )
    controller: bool | None = said("True for the one owner that manages this object.")
    kind: str | None = said("Kind of the owner.")
    name: str | None = said("Name of the owner.")
    uid: str | None = said("UID of the owner.")


class Metadata(Part):
    """Metadata of a template. Only labels and annotations have an effect."""

    annotations: dict[str, str] | None = said(
        "Annotations of the object that is made of the template.", nullable=True
    )
    creationTimestamp: Time | None = said("No effect in a template.", nullable=True)
    deletionGracePeriodSeconds: Int64 | None = said("No effect in a template.", nullable=True)
    deletionTimestamp: Time | None = said("No effect in a template.", nullable=True)
    finalizers: list[str] | None = said("No effect in a template.", nullable=True)
    generateName: str | None = said("No effect in a template.")
    generation: Int64 | None = said("No effect in a template.")
    labels: dict[str, str] | None = said(
        "Labels of the object that is made of the template.", nullable=True
    )
    name: str | None = said("No effect in a template.")
    namespace: str | None = said("No effect in a template.")
    ownerReferences: list[OwnerReference] | None = said("No effect in a template.", nullable=True)
    resourceVersion: str | None = said("No effect in a template.")
    selfLink: str | None = said("No effect in a template.")
    uid: str | None = said("No effect in a template.")
