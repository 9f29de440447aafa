"""Reports the command's trace span without OpenTelemetry, whose import takes 100 ms."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from virtbus.bus.client.message_format import TRACEPARENT
from virtbus.cli.failures import CliError
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.session import Session

SUBJECT = "virtbus.report.client.span"


class RootSpan:
    """The root span of a trace. The spans of requests with `headers` become its children."""

    def __init__(self, name: str) -> None:
        self.trace_id = os.urandom(16).hex()
        self.span_id = os.urandom(8).hex()
        self._name = name
        self._start_ns = time.time_ns()

    @property
    def headers(self) -> dict[str, str]:
        return {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-01"}

    def finish(self, session: Session, *, ok: bool, attributes: Mapping[str, str]) -> None:
        """Publish the span (`schemas.events.Span`) as a core NATS message; ignore errors."""
        span = {
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_id": "",
            "name": self._name,
            "service": "client",
            "start_ns": self._start_ns,
            "end_ns": time.time_ns(),
            "ok": ok,
            "attributes": dict(attributes),
        }
        frame = bodies.envelope(SUBJECT, self.span_id, None, span)
        with suppress(CliError):
            session.publish(SUBJECT, bodies.to_json(frame), headers=self.headers)
