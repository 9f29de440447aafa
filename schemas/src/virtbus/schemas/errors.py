"""The one error shape, its codes and its reasons (design §3 "Errors", bus.md §6.5)."""

from enum import IntEnum, StrEnum

from pydantic import Field

from virtbus.schemas.model import Fact


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


class ErrorBody(Fact):
    """`{code, reason, message, retry, after_ms, details[]}`."""

    code: int
    reason: str
    message: str
    retry: Retry = Retry.NEVER
    after_ms: int | None = None
    details: tuple[Detail, ...] = Field(())


class VirtbusError(Exception):
    """A refusal that a person or a program can act on; raised anywhere, rendered by the bus.

    `reason` is a stable word (`name_taken`), `message` a sentence with the next step in it.
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
        super().__init__(message)
        self.body = ErrorBody(
            code=int(code),
            reason=reason,
            message=message,
            retry=retry if retry is not None else _RETRY.get(code, Retry.NEVER),
            after_ms=after_ms,
            details=details,
        )

    @classmethod
    def of(cls, body: ErrorBody) -> "VirtbusError":
        """The error that a peer sent."""
        error = cls(
            Code(body.code) if body.code in set(Code) else Code.INTERNAL, body.reason, body.message
        )
        error.body = body
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
