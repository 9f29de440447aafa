"""Reads unstructured Kubernetes objects. Any field may be missing or have an unexpected type."""

from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one, as parsed from JSON."""


def at(value: Any, *path: str) -> Any:
    """Return the value at the path, or None if a part of the path is missing."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def part(value: Any, *path: str) -> Object:
    """Return the object at the path, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def items(value: Any, *path: str) -> list[Object]:
    """Return the list at the path. Other items than objects become empty objects."""
    found = at(value, *path)
    if not isinstance(found, list):
        return []
    return [one if isinstance(one, Mapping) else {} for one in found]


def text(value: Any, *path: str) -> str:
    """Return the string at the path, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def number(value: Any, *path: str) -> int:
    """Return the whole number at the path, or 0."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def key(obj: Any) -> str:
    """Return `namespace/name`."""
    return f"{text(obj, 'metadata', 'namespace')}/{text(obj, 'metadata', 'name')}"
