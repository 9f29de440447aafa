"""Defines the base of the records that virtbus-cri stores on its node."""

from virtbus.schemas.model import SCHEMA_VERSION, LenientModel


class StoredRecord(LenientModel):
    """A record in a file of its own, with the schema version of its writer (ADR 0040)."""

    schema_version: int = SCHEMA_VERSION
