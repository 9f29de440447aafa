"""Defines the limits of uploads, and their refusals."""

from dataclasses import dataclass

from virtbus.schemas.errors import Code, Retry, VirtbusError


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of the number of uploads. One account has at most three quarters of `at_once`."""

    at_once: int = 4
    per_account: int = 64
    """Number of uploaded names and unfinished uploads that one account may have on the node."""


def name_taken(name: str, why: str) -> VirtbusError:
    """Return the error 409 `image_name_taken`."""
    return VirtbusError(
        Code.CONFLICT,
        "image_name_taken",
        f"the name {name!r} {why} on this node; choose another name, or remove that one first: "
        f"virtbus image delete {name}",
    )


def too_many(names: int, unfinished: int, most: int) -> VirtbusError:
    """Return the error 429 `upload_limit`, without a retry: only a delete helps."""
    return VirtbusError(
        Code.EXHAUSTED,
        "upload_limit",
        f"these credentials have {names} uploaded images and {unfinished} unfinished uploads on "
        f"this node, and may have {most} (setting max_uploads); remove images that are not needed "
        "with 'virtbus image delete'; unfinished uploads expire after a day",
        retry=Retry.NEVER,
    )


def mismatch(name: str, digest: str, hex_digest: str) -> VirtbusError:
    """Return the error 409 `digest_mismatch`."""
    return VirtbusError(
        Code.CONFLICT,
        "digest_mismatch",
        f"the bytes of the upload {name} have sha256:{hex_digest}, not the announced {digest}; "
        "nothing was stored: upload a file that nobody changes meanwhile",
    )


def stalled(moved_bytes: int, window_s: float) -> VirtbusError:
    """Return the error 503 `upload_stalled`. The bytes are kept for the next attempt."""
    return VirtbusError(
        Code.UNAVAILABLE,
        "upload_stalled",
        f"{moved_bytes} bytes in {window_s:g} s is too slow; the bytes so far are kept, upload "
        "the file again to continue",
        after_ms=100,
    )
