"""Defines the exception of the `virtbus` command, and its exit codes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Exit(IntEnum):
    """The exit codes of the command."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNKNOWN = 4
    """No answer arrived in time. The request may have had an effect; repeat the request."""
    UNAVAILABLE = 5


class CliError(Exception):
    """A failure of the command. `hint` is the next step.

    `details` are maps with path, message and hint.
    """

    def __init__(
        self,
        exit_code: Exit,
        reason: str,
        message: str,
        *,
        hint: str = "",
        details: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.reason = reason
        self.message = message
        self.hint = hint
        self.details = tuple(dict(detail) for detail in details)
        self.code = 0
        self.retry = "never"
        self.after_ms: int | None = None

    @classmethod
    def answered(cls, body: Mapping[str, Any]) -> "CliError":
        """Return the error for a service's answer (`schemas.errors.ErrorBody` as a map)."""
        code = int(body.get("code") or 500)
        error = cls(
            _EXIT_OF.get(code, Exit.REFUSED),
            str(body.get("reason") or "refused"),
            str(body.get("message") or "the service gave no reason"),
            details=[d for d in body.get("details") or () if isinstance(d, Mapping)],
        )
        error.code = code
        error.retry = str(body.get("retry") or "never")
        error.after_ms = body.get("after_ms")
        return error

    def as_map(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "reason": self.reason,
            "message": self.message,
            "exit_code": int(self.exit_code),
        }
        if self.code:
            fields |= {"code": self.code, "retry": self.retry}
        if self.after_ms is not None:
            fields["after_ms"] = self.after_ms
        if self.hint:
            fields["hint"] = self.hint
        if self.details:
            fields["details"] = list(self.details)
        return {"error": fields}

    def as_lines(self) -> list[str]:
        """Return the lines for a person: `error: …`, the details, the hint."""
        lines = [f"error: {self.message}"]
        for detail in self.details:
            path, text = detail.get("path", ""), detail.get("message", "")
            line = f"{path}: {text}" if path else str(text)
            if line != self.message:
                lines.append(f"  {line}")
            if detail.get("hint"):
                lines.append(f"    hint: {detail['hint']}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return lines


_EXIT_OF = {
    404: Exit.NOT_FOUND,
    410: Exit.NOT_FOUND,
    429: Exit.UNAVAILABLE,
    500: Exit.UNKNOWN,
    503: Exit.UNAVAILABLE,
    504: Exit.UNKNOWN,
}


def usage(message: str, hint: str = "") -> CliError:
    """Return the error for a mistake in the command line or in a named file."""
    return CliError(Exit.USAGE, "usage", message, hint=hint)


def unavailable(message: str, hint: str = "") -> CliError:
    """Return the error for an unreachable service. The request had no effect."""
    return CliError(Exit.UNAVAILABLE, "unavailable", message, hint=hint)


def unknown(message: str, hint: str = "") -> CliError:
    """Return the error for a request that may have had an effect."""
    return CliError(Exit.UNKNOWN, "outcome_unknown", message, hint=hint)


def tried(work: Callable[[T], R], items: Iterable[T]) -> tuple[list[R], list[CliError]]:
    """Call `work` for each item; return all results and all errors."""
    results: list[R] = []
    failed: list[CliError] = []
    for item in items:
        try:
            results.append(work(item))
        except CliError as error:
            failed.append(error)
    return results, failed


def worst(failed: Sequence[CliError]) -> CliError:
    """Return the error with the highest exit code, with the other errors as details."""
    found = max(failed, key=lambda error: error.exit_code)
    for other in failed:
        if other is not found:
            found.details = (*found.details, {"message": other.message, "reason": other.reason})
    return found
