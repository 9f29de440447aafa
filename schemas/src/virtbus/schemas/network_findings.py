"""Compares plain values with a shape, and collects problems and unknown keys by their path."""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_FINDINGS = 20


@dataclass(slots=True)
class Findings:
    """Problems (path: message) and paths of unknown keys, MAX_FINDINGS of each at most."""

    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def problem(self, path: str, message: str) -> None:
        if len(self.problems) < MAX_FINDINGS:
            self.problems.append(f"{path}: {message}" if path else message)

    def unknown_key(self, path: str) -> None:
        if len(self.unknown) < MAX_FINDINGS:
            self.unknown.append(path)


class Scalar(NamedTuple):
    """A value for which `accepts` returns True."""

    description: str
    accepts: Callable[[Any], bool]


class ListOf(NamedTuple):
    """A list whose items have one shape."""

    item: "Shape"


class Named(NamedTuple):
    """A map of names to values of one shape."""

    item: "Shape"


class Fields(NamedTuple):
    """A map with these keys. An unknown key is accepted, and reported as unknown."""

    known: Mapping[str, "Shape"]
    required: tuple[str, ...] = ()


Shape = Scalar | ListOf | Named | Fields


def _whole(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and value.isascii() and value.isdigit()
    )


def _address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_interface(value))
    except ValueError:
        return False


def _texts(value: Any) -> bool:
    many = value if isinstance(value, list) else [value]
    return all(isinstance(one, str) for one in many)


TEXT = Scalar("text (in quotes, if YAML reads it as a number)", lambda v: isinstance(v, str))
WHOLE = Scalar("a whole number", _whole)
FLAG = Scalar("true or false", lambda v: isinstance(v, bool | str))
ADDRESS = Scalar("an IP address, with or without a prefix length", _address)
TEXTS = Scalar("text, or a list of texts", _texts)
ADDRESSES = Scalar(
    "an IP address, or a list of them",
    lambda v: all(map(_address, v if isinstance(v, list) else [v])),
)
ADDRESS_OR_MAP = Scalar("an IP address", lambda v: isinstance(v, dict) or _address(v))
ANY = Scalar("anything", lambda _: True)


def compare(value: Any, shape: Shape, path: str, found: Findings) -> None:
    """Add to `found` each part of `value` that is not of the shape, and each unknown key."""
    if isinstance(shape, Scalar):
        if not shape.accepts(value):
            found.problem(path, f"must be {shape.description}")
    elif isinstance(shape, ListOf):
        _compare_list(value, shape, path, found)
    elif not isinstance(value, dict):
        found.problem(path, "must be a map")
    elif isinstance(shape, Named):
        for name, item in value.items():
            compare(item, shape.item, _below(path, name), found)
    else:
        _compare_fields(value, shape, path, found)


def _compare_list(value: Any, shape: ListOf, path: str, found: Findings) -> None:
    if not isinstance(value, list):
        found.problem(path, "must be a list")
        return
    for index, item in enumerate(value):
        compare(item, shape.item, f"{path}[{index}]", found)


def _compare_fields(value: Mapping[Any, Any], shape: Fields, path: str, found: Findings) -> None:
    for name in shape.required:
        if value.get(name) is None:
            found.problem(_below(path, name), "is missing")
    for name, item in value.items():
        inner = shape.known.get(name) if isinstance(name, str) else None
        if inner is None:
            found.unknown_key(_below(path, name))
        elif item is not None:  # null counts as absent, as in cloud-init
            compare(item, inner, _below(path, name), found)


def _below(path: str, name: Any) -> str:
    return f"{path}.{str(name)[:64]}" if path else str(name)[:64]
