"""Lists in pages: the request, and the position of the next page."""

from pydantic import ConfigDict, Field

from virtbus.schemas.model import LenientModel, StrictModel


class PageAsk(StrictModel):
    """A request for a list without a filter. Send the `continue` of a page for the next page."""

    continue_: str | None = Field(None, alias="continue", max_length=1024)


class Paged(LenientModel):
    """A page of a list, bounded in bytes. `continue` is set if more pages follow."""

    continue_: str | None = Field(None, alias="continue")

    model_config = ConfigDict(populate_by_name=True)
