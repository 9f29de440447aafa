"""Reads Kubernetes objects into typed values, by one path for each field of a dataclass.

A value that is missing or has another type becomes the empty value of the field's type.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from virtbus.kubebridge.core.objects.plain import Object

T = TypeVar("T")


def at(*path: str, default: Any = None, make: Callable[[Any], Any] | None = None) -> Any:
    """Declare a field that is read from the path. Without a path, it is the whole object.

    `make` converts a value; without it, the field's type does.
    """
    return field(metadata={"path": path, "default": default, "make": make})


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a status. Times are as Kubernetes writes them."""

    type: str = at("type")
    status: str = at("status")
    reason: str = at("reason")
    message: str = at("message")
    since: str = at("lastTransitionTime")
    probed: str = at("lastProbeTime")


def read(cls: type[T], obj: object) -> T:
    """Return the object as a dataclass."""
    values = []
    for path, convert in _plan(cast("Hashable", cls)):
        value: Any = obj
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        values.append(convert(value))
    return cls(*values)


@cache
def _plan(cls: Hashable) -> tuple[tuple[tuple[str, ...], Callable[[Any], Any]], ...]:
    hints = get_type_hints(cls)
    return tuple(
        (
            one.metadata["path"],
            one.metadata["make"] or _converter(hints[one.name], one.metadata["default"]),
        )
        for one in fields(cast("Any", cls))
    )


def _converter(hint: Any, default: Any) -> Callable[[Any], Any]:
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        convert = _item(item)
        return lambda value: tuple(map(convert, value)) if isinstance(value, list) else ()
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        known: Mapping[Any, Any] = {str(one): one for one in hint}
        return lambda value: known.get(value, default) if isinstance(value, str) else default
    return _SCALARS[hint]


def _item(item: Any) -> Callable[[Any], Any]:
    if is_dataclass(item):
        return lambda value: read(cast("type[Any]", item), value)
    return _SCALARS[item]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def moment(value: Any) -> datetime | None:
    """Parse a time. Return None if it is invalid."""
    try:
        return datetime.fromisoformat(value).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):  # the time is out of range in UTC
        return None


_SCALARS: Mapping[Any, Callable[[Any], Any]] = {
    str: lambda value: value if isinstance(value, str) else "",
    bool: bool,
    Any: lambda value: value,
    int: lambda value: _number(value) or 0,
    int | None: _number,
    datetime | None: moment,
    Object: lambda value: value if isinstance(value, Mapping) else {},
}
