"""A lease: the right of one process to act for a role."""

from virtbus.schemas.model import SCHEMA_VERSION, LenientModel


class Lease(LenientModel):
    """`$KV.lease.<role>`. The key's revision is the fencing token, which only rises."""

    schema_version: int = SCHEMA_VERSION
    holder: str
    """The instance that holds the lease."""
