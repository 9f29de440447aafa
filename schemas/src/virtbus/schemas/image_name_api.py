"""Requests and answers of the public API about image names, `virtbus.api.v1.imagename.<verb>`."""

from pydantic import Field

from virtbus.schemas.ids import Uid
from virtbus.schemas.image_name import ImageName, ImageNameSpec, Scope
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count


class ImageNameAsk(StrictModel):
    """`imagename.get`. The namespace `_` has the names of the whole fleet."""

    name: ImageName
    namespace: Scope = "default"


class ImageNameSet(ImageNameAsk):
    """`imagename.set`: makes the name, or replaces its whole spec.

    With `revision`, the request is refused if the name has another revision. With `revision` 0, the
    name must not exist. Only the credentials `admin` can set or delete names of the fleet.
    """

    spec: ImageNameSpec
    revision: Count | None = Field(None, ge=0, le=2**62)


class ImageNameDelete(ImageNameAsk):
    """`imagename.delete`. VMs keep the meaning that the name had at their create."""


class ImageNameList(StrictModel):
    """`imagename.list`. Send the `continue` of a page to request the next page."""

    namespace: Scope | None = None
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=512)


class ImageNameView(LenientModel):
    """An image name as the API shows it."""

    uid: Uid
    namespace: str
    name: str
    spec: ImageNameSpec
    generation: int
    revision: int
    created_ns: int
    changed_ns: int


class ImageNameDeleted(LenientModel):
    """The answer of `imagename.delete`. `uid` is empty if the stored record could not be read."""

    namespace: str
    name: str
    uid: str = ""


class ImageNamePage(Paged):
    """A page of `imagename.list`, ordered by namespace and name."""

    items: tuple[ImageNameView, ...] = ()
