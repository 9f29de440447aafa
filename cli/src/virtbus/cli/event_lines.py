"""Formats events as table rows: time, kind, node, service, duration, message."""

import sys
from collections.abc import Mapping
from typing import Any

from virtbus.cli import output, units

HEADER = ("TIME", "SINCE", "EVENT", "NODE", "BY", "TOOK", "MESSAGE")
_WIDTHS = (12, 10, 18, 14, 10, 8, 0)


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the kind of an event (an `EventItem` as a map), from the data or the subject."""
    data = item.get("data") or {}
    return str(data.get("kind") or ".".join(str(item.get("subject", "")).split(".")[4:]))


def at_ns(item: Mapping[str, Any]) -> int:
    """Return an event's Unix time in ns, by the sender's clock or, if missing, by the stream's."""
    return int((item.get("data") or {}).get("at_ns") or item.get("time_ns") or 0)


def cells(item: Mapping[str, Any], first_ns: int) -> tuple[str, ...]:
    """Return an event's cells for HEADER. SINCE counts from `first_ns`."""
    data = item.get("data") or {}
    took = data.get("took_ms")
    return (
        units.clock(at_ns(item)),
        f"+{max(0, at_ns(item) - first_ns) / units.NS:.3f}s",
        kind_of(item),
        str(data.get("node") or "-").replace("_", "-"),
        str(data.get("service") or "-"),
        units.span_ms(float(took)) if took is not None else "-",
        str(data.get("message") or data.get("reason") or ""),
    )


def line(texts: tuple[str, ...]) -> str:
    """Return one table line with fixed widths, for output that grows."""
    padded = [output.safe(text).ljust(width) for text, width in zip(texts, _WIDTHS, strict=True)]
    return "  ".join(padded).rstrip()


class EventPrinter:
    """Prints events when they arrive. SINCE counts from the first event."""

    def __init__(self, style: str) -> None:
        self._style = style
        self._first_ns = 0

    def say(self, item: Mapping[str, Any], name: str | None = None) -> None:
        """Print one event as a table line, a JSON line or a YAML document; flush stdout."""
        self._first_ns = self._first_ns or at_ns(item)
        if self._style == "table":
            shown = line(cells(item, self._first_ns))
            text = shown if name is None else f"{output.safe(name):<16}  {shown}"
        else:
            text = output.document(item, self._style)
        output.write(text)
        output.flush(sys.stdout)
