"""Lists in pages: what is asked, and where the next page begins."""

from pydantic import ConfigDict, Field

from virtbus.schemas.model import Command, Fact


class PageAsk(Command):
    """A list without a filter. `continue` of one page asks for the next."""

    continue_: str | None = Field(None, alias="continue", max_length=1024)


class Paged(Fact):
    """A page of a list; a page is bounded in bytes. `continue` is there while more follow."""

    continue_: str | None = Field(None, alias="continue")

    model_config = ConfigDict(populate_by_name=True)
