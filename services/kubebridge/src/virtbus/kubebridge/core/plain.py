"""Reading Kubernetes' objects, which may hold anything where a cluster's schema is not ours."""

from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one, as JSON brings it."""


def at(value: Any, *path: str) -> Any:
    """What is at the path, or None where something on the way is not there."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def part(value: Any, *path: str) -> Object:
    """The object at the path, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def items(value: Any, *path: str) -> list[Object]:
    """The list at the path; what is no object in it is an empty one, so that places stay."""
    found = at(value, *path)
    if not isinstance(found, list):
        return []
    return [one if isinstance(one, Mapping) else {} for one in found]


def text(value: Any, *path: str) -> str:
    """The string at the path, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def number(value: Any, *path: str) -> int:
    """The whole number at the path, or 0."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def key(obj: Any) -> str:
    """`namespace/name`."""
    return f"{text(obj, 'metadata', 'namespace')}/{text(obj, 'metadata', 'name')}"
