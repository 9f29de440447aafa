"""Names the headers and content types of messages, and builds envelopes as dicts.

To load fast, this module imports no library.
"""

from typing import Any

MSGPACK = "application/msgpack"
JSON = "application/json"
CONTENT_TYPE = "Content-Type"
TRACEPARENT = "traceparent"
ERROR_CODE = "Nats-Service-Error-Code"
ERROR_TEXT = "Nats-Service-Error"


def type_of(subject: str) -> str:
    """Return the CloudEvents `type` of a subject, for example `virtbus.vm.create.v1`."""
    match subject.split("."):
        case ["virtbus", "api", version, *rest]:
            return ".".join(("virtbus", *rest, version))
        case ["virtbus", "evt", _, _, *rest]:
            return ".".join(("virtbus", *rest, "v1"))
        case ["virtbus", "node", _, "ready" | "progress" as plane, _, *rest]:
            return ".".join(("virtbus", plane, *rest, "v1"))
        case ["virtbus", "node", _, "rpc" | "report" as plane, *rest] | [
            "virtbus",
            "ask" as plane,
            _,
            *rest,
        ]:
            return ".".join(("virtbus", plane, *rest, "v1"))
        case ["virtbus", *rest]:
            return ".".join(("virtbus", *rest[:2], "v1"))
        case _:
            return ""


def frame_of(
    subject: str, value: Any, *, message_id: str, source: str, timeout_ms: int | None = None
) -> dict[str, Any]:
    """Return `value` in an envelope with CloudEvents names. A request needs `timeout_ms`."""
    frame: dict[str, Any] = {
        "id": message_id,
        "source": source,
        "type": type_of(subject),
        "subject": subject,
        "data": value,
    }
    if timeout_ms is not None:
        frame["timeout_ms"] = max(1, timeout_ms)
    return frame
