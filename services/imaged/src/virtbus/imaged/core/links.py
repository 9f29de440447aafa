"""Defines the image store's small JSON files: links of names, and notes of partial downloads."""

import hashlib
import re

from pydantic import Field

from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel

MAX_LINK_BYTES = 64 * 1024
_HEX = re.compile(r"^[0-9a-f]{64}$")


class NameLink(LenientModel):
    """The file `links/<sha256(name)>`: an image name, and the stored image that it denotes."""

    schema_version: int = SCHEMA_VERSION
    name: str = Field(max_length=4096)
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    format: ImageFormat
    size_bytes: int = Field(ge=1)
    virtual_size_bytes: int = Field(ge=1)
    url: str = ""
    etag: str = ""
    last_modified: str = ""
    fetched: str = Field("", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """The digest of the fetched bytes, if the stored file was extracted or converted from them."""
    uploaded_by: str = ""
    """The account that uploaded the image under this name; empty if it was fetched."""

    @classmethod
    def of(cls, name: str, image: ImageInfo, fetched: str) -> "NameLink":
        """`fetched` is the digest of the fetched bytes."""
        return cls(
            name=name,
            digest=image.digest,
            format=image.format,
            size_bytes=image.size_bytes,
            virtual_size_bytes=image.virtual_size_bytes,
            fetched=fetched if fetched != image.digest else "",
        )

    @property
    def shown(self) -> str:
        return shown_name(self.name)

    @property
    def refs(self) -> frozenset[str]:
        """The references by which a request may mean this name or its image."""
        return refs_of(self.name, self.url) | {self.digest}


def refs_of(name: str, url: str) -> frozenset[str]:
    """Return the references by which a request may mean the name of an image from `url`."""
    unpinned = name.rpartition("@")[0]
    return frozenset({name, unpinned, url, shown_name(name), url.partition("?")[0]})


def shown_name(name: str) -> str:
    """Return a name for people: a URL without its query, a name of the bus without its key."""
    return name.partition("?" if "://" in name else "#")[0]


class PartNote(LenientModel):
    """The source and the version of a partial transfer's bytes.

    A later attempt needs both to continue the download or upload.
    """

    schema_version: int = SCHEMA_VERSION
    url: str
    etag: str = ""
    last_modified: str = ""
    total_bytes: int | None = None
    done_bytes: int = 0
    """Number of bytes that were synced to the disk. Later bytes are not trusted after a crash."""
    owner: str = ""
    """The account that uploads the bytes; empty for a download."""


def file_name(name: str) -> str:
    """Return the file name of a link or part: a hash, without any byte of the name (IMG-16)."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def is_hex_digest(text: str) -> bool:
    """Return True for exactly 64 lower-case hex digits, the only file names in `data/`."""
    return _HEX.fullmatch(text) is not None


def hex_of(digest: str) -> str:
    """Return the hex part of a checked `sha256:<hex>`; ValueError for anything else (IMG-18)."""
    algorithm, _, text = digest.partition(":")
    if algorithm != "sha256" or not is_hex_digest(text):
        msg = "a digest must be sha256: and 64 lower-case hex digits"
        raise ValueError(msg)
    return text
