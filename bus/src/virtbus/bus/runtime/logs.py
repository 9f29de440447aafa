"""Sets up logging: JSON lines, or text on a terminal.

A JSON line has ts, level, service, node and message; if known, also code, uid, trace_id, exception.
"""

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("code", "uid", "trace_id")


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON line. Escaped newlines keep a message from forging lines."""

    def __init__(self, service: str, node: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "node": node}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._fixed,
        }
        line |= {name: str(getattr(record, name)) for name in _FIELDS if hasattr(record, name)}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats a log record as text: time, level, message, code, uid, trace_id."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone()
        tail = "".join(
            f" {name}={getattr(record, name)}" for name in _FIELDS if hasattr(record, name)
        )
        message = record.getMessage().replace("\n", "\\n")
        text = f"{at:%H:%M:%S}.{int(record.msecs):03d} {record.levelname:<7} {message}{tail}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup(service: str, node: str, *, level: str, style: str) -> None:
    """Send the root logger's output to stderr. `style` is auto, json or text."""
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if text else JsonFormatter(service, node))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("nats").setLevel(logging.CRITICAL)
