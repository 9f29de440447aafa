"""Errors of the bus, for every part of it and its users."""


class BusError(Exception):
    """An operation of the bus failed."""


class UnavailableError(BusError):
    """Nothing happened: no connection, no responder, or an election that outlasted the deadline."""


class OutcomeUnknownError(BusError):
    """The write or request may or may not have happened: repeat it with the same id."""


class ConflictError(BusError):
    """A compare-and-set failed: the key's last revision is not the expected one. Read it again."""


class DeniedError(BusError):
    """The credentials do not allow this subject."""


class FullError(BusError):
    """The bucket or the message exceeds its size limit."""


class OversizeError(FullError):
    """A value larger than its kind may be written (`virtbus.schemas.bounds`); nothing was sent."""
