"""Defines the base of the records that the CRI stores on its node."""

from virtbus.schemas.model import SCHEMA_VERSION, LenientModel


class StoredRecord(LenientModel):
    """A record in a file of its own, with the version of its writer (ADR 0040)."""

    schema_version: int = SCHEMA_VERSION
