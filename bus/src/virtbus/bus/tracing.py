"""Trace context: W3C traceparent in and out of messages; OpenTelemetry only where it is set up."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_inbound: ContextVar[str | None] = ContextVar("virtbus_traceparent", default=None)


def current_traceparent() -> str | None:
    """The traceparent of the running span, else of the request being handled, else None.

    Does not import OpenTelemetry: where nobody else did, there is no span (the CLI's case).
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return _inbound.get()


@contextmanager
def continued(traceparent: str | None) -> Iterator[None]:
    """Handle a request inside the trace that it came with."""
    token = _inbound.set(traceparent)
    try:
        yield
    finally:
        _inbound.reset(token)
