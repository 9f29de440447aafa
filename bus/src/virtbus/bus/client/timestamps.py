"""Parses timestamps in the NATS server's format."""

from datetime import datetime


def time_ns(text: str) -> int:
    """Return the Unix nanoseconds of an RFC 3339 text with up to nine decimals; 0 if invalid."""
    whole, _, rest = text.partition(".")
    digits = ""
    while rest and rest[0].isdigit():
        digits, rest = digits + rest[0], rest[1:]
    zone = rest or ("Z" if text.endswith("Z") else "")
    try:
        seconds = datetime.fromisoformat(whole.rstrip("Z") + (zone or "+00:00")).timestamp()
    except ValueError:
        return 0
    return int(seconds) * 1_000_000_000 + int(digits.ljust(9, "0")[:9] or 0)
