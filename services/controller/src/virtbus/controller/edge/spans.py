"""Spans that clients report of themselves, so that a trace starts where the user did."""

import logging

from virtbus.bus.ports import Bus
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import Kind, Span, Spans
from virtbus.schemas.ids import UNPLACED, check_uid
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)


class ClientSpans:
    """Checks client spans and stores them as facts; a bad one is dropped and counted in the log."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def run(self) -> None:
        """Follow `virtbus.tele.client.span`; never returns by itself."""
        async with self._bus.subscribe(subjects.client_span()) as messages:
            async for message in messages:
                try:
                    span = validate(Span, open_envelope(message.body).data)
                    uid = check_uid(span.attributes.get("virtbus.uid", ""))
                except (VirtbusError, ValueError) as error:
                    log.info("client span dropped: %s", error, extra={"code": "bad_span"})
                    continue
                span = span.model_copy(update={"service": "client", "node": ""})
                self._bus.emit(
                    subjects.event(UNPLACED, uid, Kind.SPAN),
                    Spans(spans=(span,)),
                    message_id=f"{span.trace_id}:{span.span_id}",
                )
