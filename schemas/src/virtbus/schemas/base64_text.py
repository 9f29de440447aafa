"""Bytes in requests: as text, or as base64 text."""

import base64
import binascii
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

FILE_CHARACTERS = 512 * 1024
"""Limit of one text. All secret inputs of a VM together may have as many bytes (`bounds.SECRET`).
"""


def decode_base64(text: str) -> bytes:
    """Return the bytes of a base64 text, ignoring line ends, or raise ValueError."""
    try:
        return base64.b64decode("".join(text.split("\n")).replace("\r", ""), validate=True)
    except (binascii.Error, ValueError):
        msg = "must be base64 (RFC 4648, 4), as `base64 -w0 FILE` writes it"
        raise ValueError(msg) from None


def check_base64(text: str) -> str:
    """Return `text` if it is base64, or raise ValueError."""
    decode_base64(text)
    return text


def bytes_of(text: str | None, in_base64: str | None) -> bytes | None:
    """Return the bytes of `in_base64`, by default those of `text`; None if both are None."""
    if in_base64 is not None:
        return decode_base64(in_base64)
    return text.encode() if text is not None else None


Base64 = Annotated[str, StringConstraints(max_length=FILE_CHARACTERS), AfterValidator(check_base64)]
