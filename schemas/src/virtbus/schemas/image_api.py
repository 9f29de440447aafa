"""Requests and answers of the public API about images, `virtbus.api.v1.image.<verb>`."""

from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from virtbus.schemas.container import SCHEME, only_login, parse_locator
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageInfo, ImageRef, StoredRef, parse_image_ref
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.node_rpc import ForgottenImage
from virtbus.schemas.registry_login import SECRET_BYTES


class ImageList(StrictModel):
    """`image.list`. Send the `continue` of a page to request the next page."""

    continue_: str | None = Field(None, alias="continue", pattern="^sha256:[0-9a-f]{64}$")


class ImagePull(StrictModel):
    """`image.pull`: fetches `ref` onto `node` (default: every ready node).

    `job` is the uid in the subjects of progress messages. The error 504 `image_pulling` means that
    a node needs longer. The pull continues; repeat the request.
    """

    ref: ImageRef
    node: Id | None = None
    job: Uid | None = None
    namespace: Id = "default"
    """The namespace of the image name, if `ref` is an image name."""
    pull_secret: Annotated[str, StringConstraints(max_length=SECRET_BYTES)] | None = Field(
        None, repr=False
    )
    """A `config.json` as written by `docker login`, for a container image. Only its login for this
    image is used, in place of the node's login. The secret is never stored."""

    @field_validator("pull_secret")
    @classmethod
    def _only_its_login(cls, text: str | None, info: ValidationInfo) -> str | None:
        ref = info.data.get("ref")
        if not text or ref is None:
            return None
        if not (source := parse_image_ref(ref)).is_container:
            msg = f"is for container images only, which begin with {SCHEME}"
            raise ValueError(msg)
        return only_login(parse_locator(source.locator, pinned=True), text)


class ImageDelete(StrictModel):
    """`image.delete`: removes an image by name, URL or digest from `node` (default: every node).

    The image's names are removed at once. Its file is removed as soon as no VM's disk uses it.
    """

    ref: StoredRef
    node: Id | None = None


class NodeImage(ImageInfo):
    """An image, and the nodes that have it."""

    nodes: tuple[str, ...] = ()


class ImagePage(LenientModel):
    """A page of `image.list`, ordered by digest."""

    items: tuple[NodeImage, ...] = ()
    continue_: str | None = Field(None, alias="continue")

    model_config = ConfigDict(populate_by_name=True)


class PulledImages(LenientModel):
    """The answer of `image.pull`: images and errors, each by node."""

    images: dict[str, ImageInfo] = Field(default_factory=dict)
    errors: dict[str, str] = Field(default_factory=dict)


class DeletedImages(LenientModel):
    """The answer of `image.delete`: the removed names and the errors, by node."""

    nodes: dict[str, ForgottenImage] = Field(default_factory=dict)
    errors: dict[str, str] = Field(default_factory=dict)
