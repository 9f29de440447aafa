"""Defines the errors of attempts that may be repeated."""


class TransientError(Exception):
    """Raised by an attempt for the retry loop; `after_s` is the pause that the server asked for."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class AgainError(Exception):
    """Raised by an attempt that has logged in; the retry loop repeats the attempt at once."""
