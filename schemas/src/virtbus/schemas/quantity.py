"""Byte quantities as people write them: 256MiB, 4G, 2Gi, 1073741824."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Strict, WithJsonSchema

_UNITS = {"": 0, "B": 0}
for _exponent, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {f"{_letter}i": _exponent, f"{_letter}iB": _exponent}
_DECIMAL = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_DECIMAL |= {f"{letter}B": exponent for letter, exponent in _DECIMAL.items()}
_QUANTITY = re.compile(r"^\s*([0-9]{1,19})(?:\.([0-9]{1,9}))?\s*([A-Za-z]{0,3})\s*$")


Count = Annotated[int, Strict()]
"""A whole number in a request; `true`, `"2"` and `2.0` are errors."""


def parse_bytes(value: object) -> int:
    """Return the bytes of an int, or of digits with a binary (Ki, MiB) or decimal (k, MB) unit.

    Raises:
        ValueError: the value is not a whole number of bytes in a known unit.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        msg = "must be a number of bytes or a quantity such as 256MiB"
        raise ValueError(msg)  # noqa: TRY004  pydantic collects ValueError, not TypeError
    if isinstance(value, int):
        return _whole(value)
    match = _QUANTITY.fullmatch(value)
    if match is None:
        msg = "must be a quantity such as 256MiB, 4G or 1073741824"
        raise ValueError(msg)
    whole, fraction, unit = match[1], match[2] or "", match[3]
    if unit in _UNITS:
        factor: int = 1024 ** _UNITS[unit]
    elif unit in _DECIMAL:
        factor = 1000 ** _DECIMAL[unit]
    else:
        msg = f"unknown unit {unit!r}; use Ki, Mi, Gi, Ti (or KiB, MiB, …) or k, M, G, T"
        raise ValueError(msg)
    scaled = int(whole + fraction) * factor
    if scaled % 10 ** len(fraction):
        msg = "must be a whole number of bytes"
        raise ValueError(msg)
    denominator: int = 10 ** len(fraction)
    return _whole(scaled // denominator)


def _whole(count: int) -> int:
    """Return `count`; raise ValueError if the wire format cannot carry it."""
    if not 0 <= count < 2**63:
        msg = "must be between 0 and 8 EiB"
        raise ValueError(msg)
    return count


def format_bytes(count: int) -> str:
    """Return `count` in its largest binary unit, with at most one decimal: 268435456 → 256MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f}{unit}" if value == int(value) else f"{value:.1f}{unit}"
        value /= 1024
    raise AssertionError(unit)


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}], "examples": ["256MiB"]}
    ),
]
"""A size in bytes. Input may be a quantity such as 256MiB; the wire always has an int."""


_LONG_NUMBER = re.compile(r"\b[0-9]{7,19}\b")


def name_bytes(text: str) -> str:
    """Return `text` with each long number in a binary unit, if that is exact: 16777216 → 16MiB."""

    def name(match: re.Match[str]) -> str:
        named = format_bytes(int(match[0]))
        return match[0] if int(match[0]) % 1024**2 or "." in named else named

    return _LONG_NUMBER.sub(name, text)
