"""Reads unstructured Kubernetes objects. Any field may be missing or have an unexpected type."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

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
    """Return the list at the path. Items that are not objects become empty objects."""
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
    return _number(at(value, *path)) or 0


def pointer(*names: str) -> str:
    """Return the JSON pointer of a path (RFC 6901)."""
    return "".join("/" + one.replace("~", "~0").replace("/", "~1") for one in names)


def key(obj: Any) -> str:
    """Return `namespace/name`."""
    return f"{text(obj, 'metadata', 'namespace')}/{text(obj, 'metadata', 'name')}"


T = TypeVar("T")


def path(*names: str, default: Any = None, make: Callable[[Any], Any] | None = None) -> Any:
    """Declare a dataclass field that `read` takes from this path.

    An empty path means the whole object. `make` converts the value. Without `make`, the type of the
    field decides the conversion. `default` replaces a missing or unknown value of an enum.
    """
    return field(metadata={"path": names, "default": default, "make": make})


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a status. Times are as Kubernetes writes them."""

    type: str = path("type")
    status: str = path("status")
    reason: str = path("reason")
    message: str = path("message")
    since: str = path("lastTransitionTime")
    probed: str = path("lastProbeTime")


def read(cls: type[T], obj: object) -> T:
    """Return the object as the dataclass `cls`, whose fields are declared with `path`."""
    return cls(*(convert(at(obj, *names)) for names, convert in _plan(cast("Hashable", cls))))


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
        convert = _converter(get_args(hint)[0], None)
        return lambda value: tuple(map(convert, value)) if isinstance(value, list) else ()
    if is_dataclass(hint):
        return lambda value: read(cast("type[Any]", hint), value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        values: Mapping[Any, Any] = {str(one): one for one in hint}
        return lambda value: values.get(value, default) if isinstance(value, str) else default
    return _SCALARS[hint]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def moment(value: Any) -> datetime | None:
    """Parse a time. Return None if it is invalid."""
    try:
        return datetime.fromisoformat(value).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):  # OverflowError: out of range in UTC
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


def stamp(now: datetime) -> str:
    """Format a time as Kubernetes does."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(now: datetime) -> str:
    """Format a MicroTime, as Events and Leases have it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class NewCondition(NamedTuple):
    """A condition to write, still without its transition time."""

    type: str
    on: bool
    reason: str = ""
    message: str = ""
    probed: str = ""


def merged(
    conditions: Iterable[NewCondition], before: Iterable[Condition], now: datetime
) -> tuple[list[Any], str]:
    """Return the conditions with transition times, and `now` in Kubernetes' format.

    A condition whose status has not changed keeps its transition time.
    """
    at = stamp(now)
    stored = {one.type: one for one in before}
    result = []
    for one in conditions:
        old, status = stored.get(one.type), str(one.on)
        since = old.since if old is not None and old.status == status else ""
        texts = {"reason": one.reason, "message": one.message, "lastProbeTime": one.probed}
        result.append(
            {"type": one.type, "status": status}
            | {name: value for name, value in texts.items() if value}
            | {"lastTransitionTime": since or at}
        )
    return result, at
