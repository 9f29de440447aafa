"""Request and answer of `vm.events`: stored events, in pages."""

from pydantic import Field

from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.quantity import Count


class EventList(StrictModel):
    """`vm.events`: requests stored events of one VM or of all VMs; `spans` adds trace spans.

    The page starts after the stream's sequence number `after`. A page has at most 200 events, even
    if `limit` is higher.
    """

    uid: Uid | None = None
    after: Count = Field(0, ge=0)
    limit: Count = Field(200, ge=1, le=1000)
    spans: bool = False


class EventItem(LenientModel):
    """A stored event. `data` is an `Event` or a `Span` as a map."""

    sequence: int
    subject: str
    time_ns: int
    data: dict[str, object] = Field(default_factory=dict)


class EventPage(LenientModel):
    """A page of `vm.events`.

    Send `next_after` as `after` to request the next page. On the last page it is None.
    """

    items: tuple[EventItem, ...] = ()
    next_after: int | None = None
