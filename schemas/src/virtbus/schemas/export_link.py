"""Links for HTTP downloads of exports (ADR 0062)."""

from pydantic import Field

from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel, StrictModel

MAX_LINK_S = 7 * 86_400


class ExportLinkAsk(StrictModel):
    """`rpc.imaged.export-link`: make a link to the file of the export `id`."""

    id: Uid
    valid_s: int = Field(3600, ge=1, le=MAX_LINK_S)


class ExportLink(LenientModel):
    """With `url`, anybody can read the file until `expires_ns`. The query of `url` is a secret."""

    url: str
    expires_ns: int
    size_bytes: int = Field(0, ge=0)
    digest: str = ""
