"""Parses Kubernetes' quantities: 4G, 1.5Gi, 100m, 1e9 (apimachinery, resource.Quantity)."""

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

_GRAMMAR = re.compile(
    r"([+-]?)([0-9]{1,20}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})"
    r"(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?[0-9]{1,2})?"
)
_BINARY = {unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
LARGEST = 2**63 - 1


def parse(value: Any) -> Decimal:
    """Return the number of a quantity.

    Raises:
        ValueError: it is not a quantity, or its amount is larger than 2^63 - 1.
    """
    msg = "must be a quantity such as 4Gi, 500M or 2"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(msg)  # noqa: TRY004  callers catch only ValueError
    match = _GRAMMAR.fullmatch(str(value))
    if match is None:
        raise ValueError(msg)
    number, unit = Decimal(match[1] + match[2]), match[3] or ""
    if unit in _BINARY:
        number *= _BINARY[unit]
    elif unit:
        number = number.scaleb(_DECIMAL[unit] if unit in _DECIMAL else int(unit[1:]))
    if abs(number) > LARGEST:
        msg = "must be between 0 and 8 EiB"
        raise ValueError(msg)
    return number


def whole(value: Any) -> int:
    """Return the quantity rounded up to a whole number: bytes, or CPUs.

    Raises:
        ValueError: it is not a quantity, it is negative, or it is larger than 2^63 - 1.
    """
    number = parse(value)
    if number < 0:
        msg = "must not be negative"
        raise ValueError(msg)
    return int(number.to_integral_value(ROUND_CEILING))
