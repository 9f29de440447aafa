"""Defines the exceptions that the bus raises."""


class BusError(Exception):
    """An operation of the bus failed."""


class UnavailableError(BusError):
    """The operation had no effect: no connection, responder or leader until the deadline."""


class OutcomeUnknownError(BusError):
    """The write or request may have had an effect. Repeat it with the same id."""


class ConflictError(BusError):
    """A compare-and-set failed, because the key has another last revision. Read the key again."""


class DeniedError(BusError):
    """The bus refuses the login or this subject, or its certificate is not trusted."""


class FullError(BusError):
    """The bucket or the message exceeds its size limit."""


class OversizeError(FullError):
    """A value exceeds the limit of its kind (`virtbus.schemas.bounds`). It was not sent."""
