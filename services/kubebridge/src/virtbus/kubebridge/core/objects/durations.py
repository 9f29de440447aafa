"""Reads Go's durations, such as `5m0s` (time.ParseDuration)."""

import re

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h)")
_PARTS_MAX = 16


def seconds_of(text: object) -> float | None:
    """Return a duration in seconds; None if it is invalid, or has a sign or more than 16 parts."""
    if text == "0":
        return 0.0
    if not isinstance(text, str) or not text:
        return None
    at, total_s = 0, 0.0
    for _ in range(_PARTS_MAX):
        part = _PART.match(text, at)
        if part is None:
            return None
        total_s += float(part[1]) * _UNITS_S[part[2]]
        at = part.end()
        if at == len(text):
            return total_s
    return None
