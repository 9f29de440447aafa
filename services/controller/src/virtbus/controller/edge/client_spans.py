"""Stores the spans that clients report, so that a trace starts at the client."""

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.subscriptions import hear
from virtbus.schemas import subjects
from virtbus.schemas.events import EventKind, Span, SpanBatch
from virtbus.schemas.ids import UNPLACED, check_uid


async def store_client_spans(bus: Bus) -> None:
    """Store each reported span as an event, and skip invalid spans. Never return."""

    def store(reported: Span) -> None:
        uid = check_uid(reported.attributes.get("virtbus.uid", ""))
        span = reported.model_copy(update={"service": "client", "node": ""})
        bus.emit(
            subjects.event(UNPLACED, uid, EventKind.SPAN),
            SpanBatch(spans=(span,)),
            message_id=f"{span.trace_id}:{span.span_id}",
        )

    async with bus.subscribe(subjects.client_span()) as messages:
        await hear(messages, Span, store)
