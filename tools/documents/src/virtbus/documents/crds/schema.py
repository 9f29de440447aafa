"""Converts a model of a KubeVirt object to the structural schema of a CustomResourceDefinition.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
Remark = Callable[[str], str]
"""Maps the path of a field to text that is added to its description. `[]` stands for list items."""

REFERENCE = "#/$defs/"
KEPT = (
    "type", "format", "enum", "pattern", "minimum", "maximum", "maxLength", "maxItems", "default",
    "nullable", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
)  # fmt: skip


def structural(model: type[BaseModel], remark: Remark) -> Schema:
    """Return a model's schema without references and null types. Each field has a description."""
    whole = model.model_json_schema()
    return _schema(whole, whole.get("$defs", {}), "", remark)


def _schema(
    said: Mapping[str, Any], models: Mapping[str, Any], path: str, remark: Remark
) -> Schema:
    """Return the schema of the value at a path. Keywords of a field override those of its type."""
    merged: Schema = {}
    for layer in _layers(said, models):
        merged = {**layer, **merged}
    made = {key: merged[key] for key in KEPT if merged.get(key) is not None}
    text = " ".join(filter(None, (merged.get("description"), remark(path))))
    if text:
        made["description"] = text
    if merged.get("properties"):  # API servers drop an empty map: each `apply` would differ
        made["properties"] = {
            name: _schema(one, models, f"{path}.{name}".removeprefix("."), remark)
            for name, one in merged["properties"].items()
        }
    if merged.get("required"):
        made["required"] = merged["required"]
    if "items" in merged:
        made["items"] = _schema(merged["items"], models, f"{path}[]", remark)
    values = merged.get("additionalProperties")
    if isinstance(values, dict) and "x-kubernetes-preserve-unknown-fields" not in made:
        made["additionalProperties"] = _schema(values, models, f"{path}.*", remark)
    return made


def _layers(said: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of a value: first the schema of the field, then those of its type."""
    yield said
    if "$ref" in said:
        yield from _layers(models[said["$ref"].removeprefix(REFERENCE)], models)
    for one in said.get("anyOf") or ():
        if one != {"type": "null"}:
            yield from _layers(one, models)
            return  # x-kubernetes-int-or-string replaces the alternatives
