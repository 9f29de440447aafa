"""The one error shape, its codes and its reasons (design §3 "Errors", bus.md §6.5)."""

import re
from enum import IntEnum, StrEnum

from pydantic import Field

from virtbus.schemas.model import Fact

MAX_DETAILS = 100
"""Problems that one refusal lists."""
MAX_REASON_CHARS = 64
MAX_MESSAGE_CHARS = 2000
MAX_DETAIL_CHARS = 500
"""Each of a detail's path, message and hint."""
MAX_ERROR_BYTES = 64 * 1024
"""A refusal as JSON or msgpack; a message on the bus may have 1 MiB."""
_BODY_BYTES = 4096
"""What a refusal's own fields and their names need beside its message."""
_DETAIL_BYTES = 40
"""The names and quotes around one detail."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Controls, which JSON writes with six bytes each, and lone surrogates, which no encoding takes."""


def quotable(text: str, most: int) -> str:
    """`text` cut to `most` characters, without controls; at most four bytes a character."""
    kept = text if len(text) <= most else text[: most - 1] + "…"
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", kept)


class Code(IntEnum):
    """What class of problem it is; HTTP's numbers, so that people know them."""

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
    """What a client may do: give up, repeat the very same request, or repeat it later."""

    NEVER = "never"
    SAME_ID = "same_id"
    LATER = "later"


_RETRY = {
    Code.EXHAUSTED: Retry.LATER,
    Code.UNAVAILABLE: Retry.LATER,
    Code.DEADLINE: Retry.SAME_ID,
    Code.INTERNAL: Retry.SAME_ID,
}


class Detail(Fact):
    """One problem: the field's path (`spec.domain.cpu.cores`) or the subject, and what to do."""

    path: str = ""
    message: str
    hint: str = ""

    def bounded(self) -> "Detail":
        """The same with texts of at most MAX_DETAIL_CHARS each."""
        return Detail(
            path=quotable(self.path, MAX_DETAIL_CHARS),
            message=quotable(self.message, MAX_DETAIL_CHARS),
            hint=quotable(self.hint, MAX_DETAIL_CHARS),
        )


class ErrorBody(Fact):
    """`{code, reason, message, retry, after_ms, details[]}`."""

    code: int
    reason: str
    message: str
    retry: Retry = Retry.NEVER
    after_ms: int | None = None
    details: tuple[Detail, ...] = Field(())

    def bounded(self) -> "ErrorBody":
        """The same with at most MAX_ERROR_BYTES, whatever it quotes.

        Texts are cut. Details that have no room are left out; the last one says how many.
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
    """Bytes of clean texts as JSON: a quote, a backslash and a line break take two."""
    return sum(len(text.encode()) + sum(map(text.count, '"\\\n\t')) for text in texts)


def unlisted(count: int) -> Detail:
    """The detail that stands for `count` others."""
    return Detail(message=f"{count} more are not listed; mend these first")


class VirtbusError(Exception):
    """A refusal that a person or a program can act on; raised anywhere, rendered by the bus.

    `reason` is a stable word (`name_taken`), `message` a sentence with the next step in it.
    It may quote what a stranger sent: it is bounded where it is made, so every copy of it is.
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
        """The error that a peer sent."""
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
        """True for the caller's mistakes and for load: not our ERROR log."""
        return self.body.code < Code.INTERNAL or self.body.code in {Code.UNAVAILABLE, Code.DEADLINE}
