"""Messages by which a client uploads an image to a node, piece by piece (ADR 0047)."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, field_validator

from virtbus.schemas.base64_text import decode_base64
from virtbus.schemas.image import ImageInfo, check_plain_name
from virtbus.schemas.model import LenientModel

PIECE_BYTES = 128 * 1024
"""Maximum bytes in one message, so that other messages on the connection wait only briefly."""
WINDOW_BYTES = 8 * PIECE_BYTES
"""Bytes that a client may send before imaged confirms them. imaged holds unconfirmed bytes in
memory."""
MAX_NAME_CHARS = 256


ImageName = Annotated[
    str, StringConstraints(max_length=MAX_NAME_CHARS), AfterValidator(check_plain_name)
]


class UploadImage(LenientModel):
    """`rpc.imaged.upload`: a piece of a file that becomes the image `name`.

    `digest` is the SHA-256 of the whole file, and `at` is the position of `data` in the file.
    Without `data` the request asks how many bytes are stored. If in addition `at` is `size_bytes`,
    and all bytes are stored, the answer waits for the image.
    """

    name: ImageName
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size_bytes: int = Field(ge=1, le=2**62)
    at: int = Field(0, ge=0)
    data: bytes = Field(b"", max_length=PIECE_BYTES)

    @field_validator("data", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Decode base64, the form of bytes in JSON."""
        return decode_base64(value) if isinstance(value, str) else value


class UploadedImage(LenientModel):
    """The answer: the node has the first `offset_bytes` of the file, or the finished image.

    A piece that begins at or before the stored end adds the missing bytes. A piece that begins
    after the stored end is not stored. The client continues at `offset_bytes`, and may send up to
    `window_bytes` that are not confirmed yet.
    """

    offset_bytes: int = Field(ge=0)
    window_bytes: int = Field(WINDOW_BYTES, ge=0)
    image: ImageInfo | None = None
