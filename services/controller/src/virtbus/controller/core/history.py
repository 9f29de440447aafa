"""Makes pages of stored events for the API; each page has a limited size."""

from collections.abc import Sequence
from typing import Any, Protocol

from virtbus.controller.core.pages import ITEM_BYTES, PAGE_BYTES, Plain, fitting, plain
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.history import EventItem, EventList, EventPage
from virtbus.schemas.records import plain_stored

SPAN = f".{EventKind.SPAN}"


class Stored(Protocol):
    """A message of the event stream."""

    @property
    def subject(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...
    @property
    def time_ns(self) -> int: ...


def page(stored: Sequence[Stored], want: EventList, *, more: bool, as_json: bool) -> Plain:
    """Return an EventPage as plain data, with as many events as fit in one answer.

    `more` is True if the stream has events after `stored`. A repeated event appears once.
    """
    items: list[Plain] = []
    left_bytes, last = PAGE_BYTES, want.after
    seen: set[tuple[str, str]] = set()
    for message in stored:
        one, shown = _read(message)
        if one in seen or (message.subject.endswith(SPAN) and not want.spans):
            shown = []
        seen.add(one)
        made = [fitting(item, as_json=as_json) for item in shown]
        if sum(size for _, size in made) > ITEM_BYTES:
            made = [fitting(_unshown(message, "it is too large"), as_json=as_json)]
        left_bytes -= sum(size for _, size in made)
        if items and left_bytes < 0:
            more = True
            break
        items += [item for item, _ in made]
        last = message.sequence
    return plain(EventPage(next_after=last if more else None), as_json=as_json) | {"items": items}


def _read(message: Stored) -> tuple[tuple[str, str], list[EventItem]]:
    """Return a message's identity, which is its subject and id, and its events.

    Messages with the same identity repeat one event. The subject contains the node, so a node
    cannot hide another node's event. A message may contain several spans.
    """
    unread = (message.subject, str(message.sequence))
    try:
        body = plain_stored(message.subject, message.body)
    except VirtbusError as error:
        return unread, [_unshown(message, str(error))]
    data = body.get("data", body) if isinstance(body, dict) else None
    spans = data.get("spans", [data]) if isinstance(data, dict) else None
    if not isinstance(spans, list) or not all(isinstance(one, dict) for one in spans):
        return unread, [_unshown(message, "it is no event")]
    one = (message.subject, str(body.get("id", message.sequence)))
    return one, [_item(message, span) for span in spans]


def _unshown(message: Stored, why: str) -> EventItem:
    return _item(message, {"message": f"this event cannot be shown: {why}"})


def _item(message: Stored, data: dict[str, Any]) -> EventItem:
    return EventItem(
        sequence=message.sequence, subject=message.subject, time_ns=message.time_ns, data=data
    )
