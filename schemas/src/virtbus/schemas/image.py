"""Images: their references, and a node's list of the images that it has."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.container import SCHEME as CONTAINER_SCHEME
from virtbus.schemas.container import ImagePullPolicy, parse_locator
from virtbus.schemas.model import LenientModel

_NAME = re.compile(
    r"^[a-z0-9][a-z0-9._-]{0,127}(/[a-z0-9][a-z0-9._-]{0,127}){0,7}(:[A-Za-z0-9._-]{1,127})?$"
)
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_SEALED_QUERY = re.compile(r"^sha256:[0-9a-f]{64}$")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")
_SCHEMES = ("http://", "https://", "file://", CONTAINER_SCHEME)


class ImageSource(NamedTuple):
    """A parsed reference: `locator` is a URL or a name, `digest` the pinned `sha256:<hex>`.

    The digest is that of the image file, or of the manifest for a container image (`docker://…`).

    `target` is the meaning of the name `locator` on the bus; None if the bus has no such name.
    """

    locator: str
    digest: str | None
    target: "ImageTarget | None" = None

    @property
    def is_url(self) -> bool:
        return self.locator.startswith(_SCHEMES)

    @property
    def is_container(self) -> bool:
        return self.locator.startswith(CONTAINER_SCHEME)

    @property
    def file_digest(self) -> str | None:
        """Return the digest that is pinned for the image file; None for a container image."""
        if self.is_container or (self.target is not None and self.target.is_container):
            return None
        return self.digest or (self.target.digest if self.target is not None else None)

    @property
    def name(self) -> str:
        """Return the image's name in a store. If a digest is pinned, the name has no URL query.

        A name with a target contains the target's key, so an image name with a new target is
        another name in the store.
        """
        locator = self.locator.partition("?")[0] if self.digest else self.locator
        if self.target is not None:
            locator = f"{locator}#{self.target.key}"
        return self._replace(locator=locator).ref

    @property
    def ref(self) -> str:
        """Return the reference as text, which `parse_image_ref` parses."""
        return self.locator if self.digest is None else f"{self.locator}@{self.digest}"


def parse_image_ref(text: str) -> ImageSource:
    """Parse `name|URL[@sha256:<hex>]`; a container image's URL gets its default registry and tag.

    Raises:
        ValueError: the scheme is unknown, the name or digest is malformed, or the text is empty or
            contains a space or control character.
    """
    if not text or _UNPRINTABLE.search(text):
        msg = "must be an image name or URL without spaces or control characters"
        raise ValueError(msg)
    locator, at, digest = text.rpartition("@")
    if not at or "/" in digest:
        locator, at, digest = text, "", ""
    if at and _DIGEST.fullmatch(digest) is None:
        msg = "the digest after '@' must be sha256: and 64 lower-case hex digits"
        raise ValueError(msg)
    if "://" in locator:
        if not locator.startswith(_SCHEMES):
            msg = "the URL scheme must be http, https, file or docker (an image in a registry)"
            raise ValueError(msg)
        if locator.startswith(CONTAINER_SCHEME):
            locator = parse_locator(locator, pinned=bool(digest)).locator
    elif _NAME.fullmatch(locator) is None:
        msg = "must be a name such as tiny or debian/12, or an http(s)://, docker:// or file:// URL"
        raise ValueError(msg)
    return ImageSource(locator, digest or None)


def check_image_ref(text: str) -> str:
    """Return a reference in its normal form; raise ValueError for an invalid reference."""
    ref = parse_image_ref(text).ref
    if len(sealed_ref(ref)[0]) > MAX_REF_CHARS:
        msg = f"is too long with the SHA-256 of its query; at most {MAX_REF_CHARS} characters"
        raise ValueError(msg)
    return ref


def check_plain_name(text: str) -> str:
    """Return an image name without a digest; raise ValueError for anything else."""
    source = parse_image_ref(text)
    if source.is_url or source.digest:
        msg = "must be a plain name such as debian/12, without a URL and a digest"
        raise ValueError(msg)
    return source.locator


def names_within(names: Sequence[str], max_bytes: int) -> tuple[str, ...]:
    """Return as many of the first names as fit into `max_bytes` together."""
    sizes = itertools.accumulate(len(name.encode()) for name in names)
    return tuple(name for name, size in zip(names, sizes, strict=True) if size <= max_bytes)


def shown_ref(ref: str) -> str:
    """Return a reference without its URL's query, which may be a signature."""
    source = parse_image_ref(ref)
    return source._replace(locator=source.locator.partition("?")[0]).ref


def sealed_ref(ref: str) -> tuple[str, str]:
    """Return the sealed form of a reference, and the query of its URL.

    The sealed form has the SHA-256 of the query in place of the query. A query may be a signature,
    so it is stored in `$KV.sec` only. The returned query is empty if there is none, or if `ref` is
    already sealed.
    """
    if "?" not in ref:
        return ref, ""
    source = parse_image_ref(ref)
    locator, mark, query = source.locator.partition("?")
    if not mark or _SEALED_QUERY.fullmatch(query):
        return ref, ""
    digest = hashlib.sha256(query.encode("utf-8", "surrogatepass")).hexdigest()
    return source._replace(locator=f"{locator}?sha256:{digest}").ref, query


def is_sealed(ref: str) -> bool:
    """Return True for a reference that `sealed_ref` has sealed."""
    if "?" not in ref:
        return False
    query = parse_image_ref(ref).locator.partition("?")[2]
    return _SEALED_QUERY.fullmatch(query) is not None


MAX_REF_CHARS = 2048
ImageRef = Annotated[
    str, StringConstraints(max_length=MAX_REF_CHARS), AfterValidator(check_image_ref)
]


def check_stored_ref(text: str) -> str:
    """Return a digest, or a reference in its normal form; raise ValueError for anything else."""
    return text if _DIGEST.fullmatch(text) else check_image_ref(text)


StoredRef = Annotated[str, StringConstraints(max_length=2048), AfterValidator(check_stored_ref)]
"""The reference or digest of an image that is already stored."""


MAX_IMAGE_KEYS = 512


def image_key(ref: str) -> str:
    """Return the key (16 hex digits) of a reference or digest, as `NodeImages` lists it."""
    return hashlib.sha256(ref.encode("utf-8", "surrogatepass")).hexdigest()[:16]


ImageKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
ImageKeys = Annotated[tuple[ImageKey, ...], Field(max_length=MAX_IMAGE_KEYS)]
"""Keys of the images that a node used last: one for each name and one for each digest."""


class ImageFormat(StrEnum):
    """The disk formats that virtbus accepts. Other formats are refused by their header (IMG-09)."""

    QCOW2 = "qcow2"
    RAW = "raw"


def check_url(text: str) -> str:
    """Return an image URL in its normal form; raise ValueError for other texts."""
    source = parse_image_ref(text)
    if not source.is_url or source.digest:
        msg = (
            "must be an http(s)://, docker:// or file:// URL; a digest belongs in the field digest"
        )
        raise ValueError(msg)
    return source.locator


ImageUrl = Annotated[str, StringConstraints(max_length=MAX_REF_CHARS), AfterValidator(check_url)]
ImageDigest = Annotated[str, StringConstraints(pattern=_DIGEST.pattern)]


class ImageTarget(LenientModel):
    """The meaning of an image name on the bus at a VM's create (ADR 0046).

    Controllers write the target into the VM's record, because nodes read only their own keys.
    """

    url: ImageUrl
    digest: ImageDigest | None = None
    transport: str = ""
    """A transport in `images.d` of the node; empty: none."""
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    namespace: str = ""
    """The namespace of the image name, `_` for a name of the whole fleet."""
    generation: int = 1

    @property
    def is_container(self) -> bool:
        return self.url.startswith(CONTAINER_SCHEME)

    @property
    def key(self) -> str:
        """Return 16 hex digits that depend only on the URL, the digest and the transport."""
        whole = f"{self.url}\n{self.digest or ''}\n{self.transport}"
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class ImageInfo(LenientModel):
    """An image in a node's store. `digest` is `sha256:<hex>` of the file's bytes."""

    digest: str
    names: tuple[str, ...] = ()
    more_names: int = 0
    """Number of further names, which are omitted."""
    format: ImageFormat
    size_bytes: int
    virtual_size_bytes: int


class Progress(LenientModel):
    """`node.<id>.progress.<uid>.<step>`: the progress of a long step; may be lost."""

    uid: str
    step: str
    done_bytes: int = Field(0, ge=0)
    total_bytes: int | None = None
    message: str = ""
