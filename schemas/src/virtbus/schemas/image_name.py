"""Image names on the bus: the URL of a name such as debian/12, and how to fetch it (ADR 0046)."""

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.ids import UNPLACED, Uid, check_id
from virtbus.schemas.image import ImageDigest, ImageUrl, check_plain_name
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel

FLEET = UNPLACED
"""The namespace of names for the whole fleet. This namespace has no VMs."""
MAX_NAME_CHARS = 128


def check_image_name(text: str) -> str:
    """Return a plain image name of at most MAX_NAME_CHARS; raise ValueError for anything else."""
    name = check_plain_name(text)
    if len(text) > MAX_NAME_CHARS:
        msg = f"must be at most {MAX_NAME_CHARS} characters"
        raise ValueError(msg)
    return name


def check_scope(text: str) -> str:
    """Return a namespace or FLEET; raise ValueError for anything else."""
    return text if text == FLEET else check_id(text)


def check_no_query(url: str) -> str:
    """Return a URL without a query; raise ValueError for a URL with a query.

    A query may contain a secret signature, and an image name is not secret.
    """
    if "?" in url:
        msg = "must have no query: it may be a secret, which an image name cannot keep"
        raise ValueError(msg)
    return url


ImageName = Annotated[str, AfterValidator(check_image_name)]
Scope = Annotated[str, StringConstraints(max_length=63), AfterValidator(check_scope)]
PlainUrl = Annotated[ImageUrl, AfterValidator(check_no_query)]
TransportName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class ImageNameSpec(StrictModel):
    """The meaning of an image name."""

    url: PlainUrl
    digest: ImageDigest | None = None
    """The digest of the image file; for a `docker://` URL, that of the manifest."""
    transport: TransportName | None = None
    """A transport in each node's `images.d`, which must permit the server of the URL."""
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """The rule for a VM's create: fetch always, only if the node lacks the image, or never."""


class ImageNameRecord(LenientModel):
    """`$KV.vm._img.<namespace>.<token>`: an image name. `<token>` is derived from `name`."""

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Scope
    name: ImageName
    spec: ImageNameSpec
    generation: int = Field(1, ge=1)
    """Rises with every change of the spec."""
    created_ns: int
    changed_ns: int
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the record. A repeat of such a request changes
    nothing."""
