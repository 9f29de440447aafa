"""The failure of one attempt that another attempt may not share."""


class TransientError(Exception):
    """Said by one attempt to the retry loop; `after_s` is what the server asked to wait."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class AgainError(Exception):
    """Said by one attempt that has changed something: make it again at once."""
