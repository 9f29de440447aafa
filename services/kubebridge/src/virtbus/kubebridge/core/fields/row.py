"""Defines a row in a table of KubeVirt's fields. Its verdict is mapped, ignored or refused."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The treatment of a field."""

    MAPPED = "mapped"
    IGNORED = "ignored"
    REFUSED = "refused"


class FieldType(StrEnum):
    """The type of a field's value. An ignored or refused field may have any type."""

    OBJECT = "an object"
    LIST = "a list"
    TEXT = "a string"
    NUMBER = "a whole number"
    FLAG = "true or false"
    QUANTITY = "a quantity"
    MAP = "a map of strings"
    ANY = "anything"


def as_is(value: Any) -> Any:
    """Return the value itself."""
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """A KubeVirt field and its treatment in virtbus.

    `path` begins below the spec of a VMI, a VM or a template. `[]` stands for each item of a list.
    `to` is the path in virtbus' VmCreate. `make` converts the value, and raises ValueError for an
    invalid value. A result of None counts as missing. If `values` or `pattern` is given, other
    values are refused. `why` explains the mapping or the refusal. `instead` is the advice for a
    refused value. If several fields of a manifest have rows with the same `to`, the earliest row
    counts.
    """

    path: str
    verdict: Verdict
    why: str
    kind: FieldType = FieldType.ANY
    to: str = ""
    make: Callable[[Any], Any] = as_is
    values: tuple[Any, ...] = ()
    pattern: str = ""
    instead: str = ""


def below(path: str, why: str = "", *, to: str = "", make: Callable[[Any], Any] = as_is) -> Field:
    """Return the row of an object, or of a list if `path` ends in `[]`.

    The fields below the object have their own rows.
    """
    kind = FieldType.LIST if path.endswith("[]") else FieldType.OBJECT
    return Field(path, Verdict.MAPPED, why, kind, to, make)


def mapped(  # noqa: PLR0913  a row has all facts about a field
    path: str,
    kind: FieldType,
    to: str = "",
    why: str = "",
    *,
    make: Callable[[Any], Any] = as_is,
    values: tuple[Any, ...] = (),
    pattern: str = "",
    instead: str = "",
) -> Field:
    """Return the row of a field that takes effect. `values` or `pattern` restricts its values."""
    return Field(path, Verdict.MAPPED, why, kind, to, make, values, pattern, instead)


def ignored(path: str, why: str) -> Field:
    """Return the row of a field that is accepted without effect, as are all fields below it."""
    return Field(path, Verdict.IGNORED, why)


def refused(path: str, why: str, instead: str) -> Field:
    """Return the row of a field that virtbus refuses, with all fields below it."""
    return Field(path, Verdict.REFUSED, why, instead=instead)
