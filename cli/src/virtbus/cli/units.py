"""Formats times, sizes and digests, and parses times."""

import time

NS = 1_000_000_000


def ago(then_ns: int | None) -> str:
    """Return the `duration` since the Unix time `then_ns`; "-" for None and 0."""
    if not then_ns:
        return "-"
    return duration(max(0.0, (time.time_ns() - then_ns) / NS))


def duration(seconds: float) -> str:
    """Return a duration in one or two units, for example 850ms, 5s, 3m12s, 4h, 12d."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 3600:
        return f"{whole // 60}m"
    return f"{whole // 3600}h" if whole < 172_800 else f"{whole // 86_400}d"


def span_ms(milliseconds: float) -> str:
    """Return a measured time, for example 3.2 ms, 412 ms, 5.31 s."""
    if milliseconds < 10:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"


def clock(at_ns: int) -> str:
    """Return the local time of day with milliseconds."""
    at = time.localtime(at_ns // NS)
    return f"{time.strftime('%H:%M:%S', at)}.{at_ns // 1_000_000 % 1000:03d}"


def size(count: int | None) -> str:
    """Return a number of bytes in the largest fitting binary unit, for example 1.5GiB.

    None becomes "-".
    """
    if count is None:
        return "-"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    unit = units[0]
    return f"{value:.0f}{unit}" if value == int(value) else f"{value:.1f}{unit}"


def digest(text: str) -> str:
    """Return the prefix and the first 12 digits of a digest `sha256:<hex>`."""
    return text[: len("sha256:") + 12]


def seconds_of(text: str) -> float:
    """Parse a time such as 90, 90s, 10m, 2h or 1d; return seconds.

    Raises:
        ValueError: the text has another form, or the time is negative or at least 1e9 seconds.
    """
    factor = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    seconds = float(text[:-1] if factor else text) * (factor or 1)
    if not 0 <= seconds < 1e9:
        msg = "out of range"
        raise ValueError(msg)
    return seconds
