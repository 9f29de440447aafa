"""Defines the error in an answer: its code, reason, message, retry rule and details."""

import re
from enum import IntEnum, StrEnum

from pydantic import Field

from virtbus.schemas.model import LenientModel

MAX_DETAILS = 100
"""Maximum number of problems in one error."""
MAX_REASON_CHARS = 64
MAX_MESSAGE_CHARS = 2000
MAX_DETAIL_CHARS = 500
"""Maximum length of each text of a detail: its path, its message and its hint."""
MAX_ERROR_BYTES = 64 * 1024
"""Maximum size of an error as JSON or msgpack; a message on the bus may have 1 MiB."""
_BODY_BYTES = 4096
"""Upper bound of an encoded error's size without its message and details."""
_DETAIL_BYTES = 40
"""Size of the field names and quotes of one encoded detail."""
_UNPRINTABLE = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
"""Control characters (without tab and line feed), line separators and lone surrogates. JSON may
write six bytes for such a character."""


def quotable(text: str, most: int) -> str:
    """Return `text` cut to `most` characters, with unprintable characters replaced."""
    kept = text if len(text) <= most else text[: most - 1] + "…"
    return re.sub(_UNPRINTABLE, "\N{REPLACEMENT CHARACTER}", kept)


class Code(IntEnum):
    """The class of the problem, numbered as in HTTP."""

    INVALID = 400
    DENIED = 403
    NOT_FOUND = 404
    CONFLICT = 409
    GONE = 410
    TOO_LARGE = 413
    UNSUPPORTED = 422
    EXHAUSTED = 429
    INTERNAL = 500
    UNAVAILABLE = 503
    DEADLINE = 504


class Retry(StrEnum):
    """The client's next step: give up, repeat with the same request id, or repeat later."""

    NEVER = "never"
    SAME_ID = "same_id"
    LATER = "later"


_RETRY = {
    Code.EXHAUSTED: Retry.LATER,
    Code.UNAVAILABLE: Retry.LATER,
    Code.DEADLINE: Retry.SAME_ID,
    Code.INTERNAL: Retry.SAME_ID,
}


class Detail(LenientModel):
    """One problem. `path` is a field (`spec.domain.cpu.cores`) or object; `hint` the next step."""

    path: str = ""
    message: str
    hint: str = ""

    def bounded(self) -> "Detail":
        return Detail(
            path=quotable(self.path, MAX_DETAIL_CHARS),
            message=quotable(self.message, MAX_DETAIL_CHARS),
            hint=quotable(self.hint, MAX_DETAIL_CHARS),
        )


class ErrorBody(LenientModel):
    """The error in an answer. `after_ms` is the pause before a repeat."""

    code: int
    reason: str
    message: str
    retry: Retry = Retry.NEVER
    after_ms: int | None = None
    details: tuple[Detail, ...] = Field(())

    def bounded(self) -> "ErrorBody":
        """Return the error cut to at most MAX_ERROR_BYTES.

        Texts are shortened first. Details that do not fit are omitted, and the last detail says how
        many are missing.
        """
        message = quotable(self.message, MAX_MESSAGE_CHARS)
        kept: list[Detail] = []
        left_bytes = MAX_ERROR_BYTES - _BODY_BYTES - _size_bytes(message)
        for detail in self.details[:MAX_DETAILS]:
            short = detail.bounded()
            left_bytes -= _DETAIL_BYTES + _size_bytes(short.path, short.message, short.hint)
            if left_bytes < 0:
                break
            kept.append(short)
        if len(kept) < len(self.details):
            kept = kept[: MAX_DETAILS - 1]
            kept.append(unlisted(len(self.details) - len(kept)))
        return self.model_copy(
            update={
                "reason": quotable(self.reason, MAX_REASON_CHARS),
                "message": message,
                "details": tuple(kept),
            }
        )


def _size_bytes(*texts: str) -> int:
    """Return the size as JSON of texts from `quotable`.

    A quote, backslash, tab or line break takes two bytes.
    """
    return sum(len(text.encode()) + sum(map(text.count, '"\\\n\t')) for text in texts)


def unlisted(count: int) -> Detail:
    """Return a detail that says that `count` others were omitted."""
    return Detail(message=f"{count} more are not listed; fix these first")


class VirtbusError(Exception):
    """An error that a person or a program can act on. The bus client sends this error as an answer.

    `reason` is a stable word (`name_taken`). `message` is a sentence that includes the next step.
    The message may quote untrusted text, so its size is bounded at construction.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        retry: Retry | None = None,
        after_ms: int | None = None,
        details: tuple[Detail, ...] = (),
    ) -> None:
        super().__init__(quotable(message, MAX_MESSAGE_CHARS))
        body = ErrorBody(
            code=int(code),
            reason=reason,
            message=message,
            retry=retry if retry is not None else _RETRY.get(code, Retry.NEVER),
            after_ms=after_ms,
            details=details,
        )
        self.body = body.bounded()

    @classmethod
    def of(cls, body: ErrorBody) -> "VirtbusError":
        """Return the exception for an error that a peer sent."""
        error = cls(
            Code(body.code) if body.code in set(Code) else Code.INTERNAL, body.reason, body.message
        )
        error.body = body.bounded()
        return error

    @property
    def code(self) -> int:
        return self.body.code

    @property
    def reason(self) -> str:
        return self.body.reason

    @property
    def expected(self) -> bool:
        """Return True for 503, 504 and codes below 500: such an error is not logged as an error."""
        return self.body.code < Code.INTERNAL or self.body.code in {Code.UNAVAILABLE, Code.DEADLINE}
