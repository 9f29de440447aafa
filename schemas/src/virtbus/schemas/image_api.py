"""Requests and answers of the public API about images, `virtbus.api.v1.image.<verb>`."""

from pydantic import ConfigDict, Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageInfo, ImageRef, StoredRef
from virtbus.schemas.model import Command, Fact
from virtbus.schemas.nodework import ForgottenImage


class ImageList(Command):
    """`image.list`. `continue_` of one page asks for the next."""

    continue_: str | None = Field(None, alias="continue", pattern="^sha256:[0-9a-f]{64}$")


class ImagePull(Command):
    """`image.pull`: fetch `ref` onto `node` (default: every ready node)."""

    ref: ImageRef
    node: Id | None = None
    job: Uid | None = None


class ImageDelete(Command):
    """`image.delete`: remove an image by name, URL or digest from `node` (default: every one).

    Its names go at once, its bytes once no VM's disk is made of it.
    """

    ref: StoredRef
    node: Id | None = None


class NodeImage(ImageInfo):
    """An image and where it is."""

    nodes: tuple[str, ...] = ()


class ImagePage(Fact):
    """A page of `image.list`, by digest."""

    items: tuple[NodeImage, ...] = ()
    continue_: str | None = Field(None, alias="continue")

    model_config = ConfigDict(populate_by_name=True)


class PulledImages(Fact):
    """The answer of `image.pull`: the image by node, and the nodes that failed with why."""

    images: dict[str, ImageInfo] = Field(default_factory=dict)
    errors: dict[str, str] = Field(default_factory=dict)


class DeletedImages(Fact):
    """The answer of `image.delete`: what went by node, and the nodes that failed with why."""

    nodes: dict[str, ForgottenImage] = Field(default_factory=dict)
    errors: dict[str, str] = Field(default_factory=dict)
