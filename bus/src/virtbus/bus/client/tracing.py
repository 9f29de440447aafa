"""Passes on the trace context of messages, and stores spans as events, without a collector.

The first span of a `recording` loads OpenTelemetry, so that a service is ready 20 ms earlier. In a
process without `recording`, such as the CLI, `span` only passes on the traceparent.
"""

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

UID = "virtbus.uid"
"""The span attribute with the VM's uid. Spans without this attribute are not stored."""
SERVICE = "virtbus.service"
"""The span attribute with the service's name, in a span recorded for another process."""
TOGETHER_S = 0.2
"""Spans of a VM within this time become one event, because each message takes CPU time."""
OTLP_ENV = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

_current: ContextVar[str | None] = ContextVar("virtbus_traceparent", default=None)
"""The traceparent of the running span, or of the request. Many messages are sent in a span."""


class Emit(Protocol):
    """The signature of `ports.Bus.emit`."""

    def __call__(self, subject: str, value: Any, *, message_id: str) -> None: ...


class SpanFactory(Protocol):
    """The signature of `span` and `no_span`."""

    def __call__(
        self, name: str, *, uid: str = "", parent: str | None = None
    ) -> AbstractContextManager[Any]: ...


def no_span(name: str, *, uid: str = "", parent: str | None = None) -> AbstractContextManager[None]:
    """Return a context that records nothing."""
    del name, uid, parent
    return nullcontext()


def current_traceparent() -> str | None:
    """Return the traceparent of the running span or of the request; None without both."""
    return _current.get()


@contextmanager
def continued(traceparent: str | None) -> Iterator[None]:
    """Run the context's body in the trace of a message. An invalid traceparent is ignored."""
    valid = traceparent is not None and _TRACEPARENT.fullmatch(traceparent)
    token = _current.set(traceparent if valid else None)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def span(name: str, *, uid: str = "", parent: str | None = None, **more: str) -> Iterator[None]:
    """Record the context's body as a span.

    Args:
        name: `virtbus <verb> <noun>`.
        uid: the VM. A span without a VM can only be exported by OTLP.
        parent: the parent's traceparent. The default is the running span, or the request's span.
        more: further attributes without secrets.
    """
    if not _recorders:
        with continued(parent or _current.get()):
            yield
        return
    from opentelemetry import context, trace

    # `start_as_current_span` would double the time, because it runs two generators.
    running = _recorders[0].tracer.start_span(
        name, context=_context(parent), attributes={UID: uid, **more} if uid else more
    )
    token = context.attach(trace.set_span_in_context(running))
    own = running.get_span_context()
    traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
    outer = _current.set(traceparent)
    try:
        yield
    except BaseException as error:
        reason = getattr(error, "reason", "") or type(error).__name__
        running.set_status(trace.Status(trace.StatusCode.ERROR, str(reason)))
        raise
    finally:
        _current.reset(outer)
        context.detach(token)
        running.end()


def record_span(
    name: str,
    *,
    uid: str,
    parent: str,
    service: str,
    start_ns: int,
    end_ns: int,
    **more: str,
) -> None:
    """Record a span of another process, `service`. Times are Unix nanoseconds."""
    if _recorders:
        attributes = {UID: uid, SERVICE: service, **more}
        _recorders[0].tracer.start_span(
            name, context=_context(parent), attributes=attributes, start_time=start_ns
        ).end(end_ns)


def _context(parent: str | None) -> "Context | None":
    from opentelemetry import trace

    if parent is None:
        if trace.get_current_span().get_span_context().is_valid:
            return None
        parent = _current.get()
    found = _TRACEPARENT.fullmatch(parent or "")
    if found is None:
        return None
    trace_id, span_id, flags = (int(group, 16) for group in found.groups())
    remote = trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(remote))


def span_fields(ended: "ReadableSpan", service: str, node: str) -> dict[str, Any]:
    """Return a finished span as a dict with the fields of `schemas.events.Span`.

    To build the model would take CPU time for each span.
    """
    own = ended.get_span_context()
    attributes = {str(k): str(v) for k, v in (ended.attributes or {}).items() if k != UID}
    service = attributes.pop(SERVICE, service)
    fields: dict[str, Any] = {
        "trace_id": f"{own.trace_id:032x}" if own else "",
        "span_id": f"{own.span_id:016x}" if own else "",
        "parent_id": f"{ended.parent.span_id:016x}" if ended.parent else "",
        "name": ended.name,
        "service": service,
        "node": node,
        "start_ns": ended.start_time or 0,
        "end_ns": ended.end_time or 0,
        "ok": ended.status.is_ok,
        "attributes": attributes,
    }
    if ended.status.description:
        fields["message"] = ended.status.description
    return fields


class _Together:
    """Joins spans of one VM that end within TOGETHER_S into one event."""

    def __init__(self, node: str, emit: Emit) -> None:
        self._node = node
        self._emit = emit
        self._pending: dict[str, list[dict[str, Any]]] = {}

    def add(self, uid: str, span: dict[str, Any]) -> None:
        waiting = self._pending.setdefault(uid, [])
        waiting.append(span)
        if len(waiting) > 1:
            return
        try:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._tell, uid)
        except RuntimeError:  # no loop in this thread
            self._tell(uid)

    def tell_all(self) -> None:
        for uid in list(self._pending):
            self._tell(uid)

    def _tell(self, uid: str) -> None:
        from virtbus.schemas.subjects import event

        spans = self._pending.pop(uid, [])
        if not spans:
            return
        try:
            subject = event(self._node, uid, "trace.span")
        except ValueError:
            log.debug("spans without a VM: %s", uid)
            return
        self._emit(subject, {"spans": spans}, message_id=spans[0]["span_id"])


def _processor(service: str, node: str, emit: Emit) -> "SpanProcessor":
    """Return a SpanProcessor that emits spans as events, without a thread."""
    from opentelemetry.sdk.trace import SpanProcessor

    together = _Together(node, emit)

    class Facts(SpanProcessor):
        def on_start(self, span: "Span", parent_context: "Context | None" = None) -> None:
            """Do nothing: only finished spans are stored."""

        def on_end(self, span: "ReadableSpan") -> None:
            uid = str((span.attributes or {}).get(UID, ""))
            if uid:
                together.add(uid, span_fields(span, service, node))

        def shutdown(self) -> None:
            together.tell_all()

    return Facts()


class _Recorder:
    """Makes the tracer of a `recording` at its first use, and shuts it down."""

    def __init__(self, service: str, node: str, emit: Emit | None, endpoint: str) -> None:
        self._service = service
        self._node = node
        self._emit = emit
        self._endpoint = endpoint
        self._provider: TracerProvider | None = None

    @cached_property
    def tracer(self) -> "Tracer":
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider(
            resource=Resource(
                {"service.name": f"virtbus-{self._service}", "host.name": self._node}
            ),
            shutdown_on_exit=False,
        )
        if self._emit is not None:
            provider.add_span_processor(_processor(self._service, self._node, self._emit))
        if self._endpoint:
            _export(provider, self._endpoint)
        self._provider = provider
        return provider.get_tracer("virtbus")

    def shutdown(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


_recorders: list[_Recorder] = []
"""The recorders of the active `recording`s, normally one. `span` uses the first."""


@contextmanager
def recording(
    service: str, node: str, emit: Emit | None = None, otlp_endpoint: str = ""
) -> Iterator[None]:
    """Record the spans of this process while the context is open.

    Args:
        service: the service's name in spans.
        node: the node in the events' subjects.
        emit: `bus.emit`; with None, spans are not stored.
        otlp_endpoint: OTLP/HTTP base URL. The default is the variable OTEL_EXPORTER_OTLP_ENDPOINT.
    """
    endpoint = otlp_endpoint or os.environ.get(OTLP_ENV, "")
    recorder = _Recorder(service, node, emit, endpoint)
    if endpoint:
        _ = recorder.tracer  # a missing exporter ends the service at its start, not at a span
    _recorders.insert(0, recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)
        recorder.shutdown()


def _export(provider: "TracerProvider", endpoint: str) -> None:
    """Also send spans to an OTLP collector. The exporter starts a thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
