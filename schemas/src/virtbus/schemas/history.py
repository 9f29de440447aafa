"""`vm.events`: stored facts, in pages."""

from pydantic import Field

from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.quantity import Count


class EventList(StrictModel):
    """`vm.events`: stored events of one VM, or of all; `spans` adds trace spans.

    A page has at most 200 events.
    """

    uid: Uid | None = None
    after: Count = Field(0, ge=0)
    limit: Count = Field(200, ge=1, le=1000)
    spans: bool = False


class EventItem(LenientModel):
    """A stored event: `event` or `span` as a map."""

    sequence: int
    subject: str
    time_ns: int
    data: dict[str, object] = Field(default_factory=dict)


class EventPage(LenientModel):
    """A page of `vm.events`; `next_after`, passed as `after`, requests the next; None: the last."""

    items: tuple[EventItem, ...] = ()
    next_after: int | None = None
