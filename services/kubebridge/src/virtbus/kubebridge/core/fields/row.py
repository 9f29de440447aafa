"""A row of the table of fields, and the three verdicts."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What becomes of a field."""

    MAPPED = "mapped"
    IGNORED = "ignored"
    REFUSED = "refused"


class Kind(StrEnum):
    """What a field's value is. What is refused or ignored may be anything."""

    OBJECT = "an object"
    LIST = "a list"
    TEXT = "a string"
    NUMBER = "a whole number"
    FLAG = "true or false"
    QUANTITY = "a quantity"
    MAP = "a map of strings"
    ANY = "anything"


def as_is(value: Any) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """A field of KubeVirt's, and what virtbus makes of it.

    `path` begins below the VMI's spec, or is one of `VM` or of a template; `[]` stands for each
    item of a list. `to` is the path in our VmCreate, `make` turns the value into ours (ValueError:
    it cannot be) where None is the same as not given. `values`, or `pattern`, are all that is
    taken. `why` tells how it is mapped, or why not; `instead` what to write in place of what is
    refused. Of rows with the same `to`, the first that is given counts.
    """

    path: str
    verdict: Verdict
    why: str
    kind: Kind = Kind.ANY
    to: str = ""
    make: Callable[[Any], Any] = as_is
    values: tuple[Any, ...] = ()
    pattern: str = ""
    instead: str = ""


def below(path: str, why: str = "", *, to: str = "", make: Callable[[Any], Any] = as_is) -> Field:
    """An object, or (its path ends in `[]`) a list of them, whose fields have rows."""
    kind = Kind.LIST if path.endswith("[]") else Kind.OBJECT
    return Field(path, Verdict.MAPPED, why, kind, to, make)


def mapped(  # noqa: PLR0913  a row says all of a field
    path: str,
    kind: Kind,
    to: str = "",
    why: str = "",
    *,
    make: Callable[[Any], Any] = as_is,
    values: tuple[Any, ...] = (),
    pattern: str = "",
    instead: str = "",
) -> Field:
    """A field that acts; of `values` or `pattern` where it is not free."""
    return Field(path, Verdict.MAPPED, why, kind, to, make, values, pattern, instead)


def ignored(path: str, why: str) -> Field:
    """A field, with all beneath, that changes nothing that a guest or its owner relies on."""
    return Field(path, Verdict.IGNORED, why)


def refused(path: str, why: str, instead: str) -> Field:
    """A field, with all beneath, that virtbus does not do."""
    return Field(path, Verdict.REFUSED, why, instead=instead)
