"""Stores the spans that clients report, so that a trace starts at the user."""

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.subscriptions import hear
from virtbus.schemas import subjects
from virtbus.schemas.events import EventKind, Span, SpanBatch
from virtbus.schemas.ids import UNPLACED, check_uid


class ClientSpans:
    """Checks client spans and stores them as events; an invalid one is dropped and logged."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def run(self) -> None:
        """Follow `virtbus.report.client.span`; never returns by itself."""
        async with self._bus.subscribe(subjects.client_span()) as messages:
            await hear(messages, Span, self._store)

    def _store(self, told: Span) -> None:
        uid = check_uid(told.attributes.get("virtbus.uid", ""))
        span = told.model_copy(update={"service": "client", "node": ""})
        self._bus.emit(
            subjects.event(UNPLACED, uid, EventKind.SPAN),
            SpanBatch(spans=(span,)),
            message_id=f"{span.trace_id}:{span.span_id}",
        )
