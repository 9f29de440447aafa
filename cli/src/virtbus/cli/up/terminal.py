"""Prints the logs of many processes on one terminal: time, service, level, message."""

import json
import re
import sys
import time
from typing import Any, TextIO

from virtbus.cli import output

_SERVICE_COLOURS = {
    "up": "1",
    "nats": "35",
    "controller": "36",
    "imaged": "34",
    "netd": "33",
    "nodeagent": "32",
    "simulator": "32",
}
_LEVEL_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}
_WIDTH = max(map(len, _SERVICE_COLOURS))
_TAIL = ("code", "uid")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_NAMED = re.compile(r"^[\s|]*[A-Za-z_][\w.]*(Error|Exception|Exit)\b")


class Terminal:
    """Prints whole lines only, so that the lines of different processes do not mix."""

    def __init__(self, level: str, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._least = _LEVELS.index(level)
        self._whole_traces = level == "DEBUG"

    def say(self, text: str, level: str = "INFO") -> None:
        if _LEVELS.index(level) >= self._least:
            self._line(_now(), "up", level, text, "")

    def relay(self, service: str, line: str) -> None:
        """Print a line of a service: a JSON log record, or other output."""
        record = _record(line)
        if record is None:
            self._line(_now(), service, "INFO", line, "")
            return
        at = str(record.get("ts", ""))[11:23] or _now()
        tail = " ".join(f"{name}={record[name]}" for name in _TAIL if record.get(name))
        message = str(record.get("message", ""))
        self._line(at, service, str(record.get("level", "INFO")), message, tail)
        for trace in self._traces(str(record.get("exception") or "")):
            self._line(at, service, "ERROR", f"  {trace}", "")

    def _traces(self, text: str) -> list[str]:
        """Return the traceback's last line that names an error; all its lines at DEBUG."""
        lines = text.splitlines()
        if self._whole_traces:
            return lines
        named = [line.lstrip(" |+-") for line in lines if _NAMED.match(line)]
        return named[-1:] or lines[-1:]

    def plain(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _line(self, at: str, service: str, level: str, message: str, tail: str) -> None:
        out = self._stream
        who = output.paint(f"{service:<{_WIDTH}}", _SERVICE_COLOURS.get(service, ""), out)
        shown = output.paint(f"{level:<7}", _LEVEL_COLOURS.get(level, ""), out)
        end = output.paint(f"  {output.safe(tail)}", "2", out) if tail else ""
        self.plain(f"{output.paint(at, '2', out)} {who} {shown} {output.safe(message)}{end}")


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _now() -> str:
    now = time.time()
    return f"{time.strftime('%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}"
