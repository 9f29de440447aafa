"""A lease: the right of one process to act for a role."""

from virtbus.schemas.model import Fact


class Lease(Fact):
    """`$KV.lease.<role>`: its revision is the fencing token, which never goes back."""

    schema_version: int = 1
    holder: str
    """The instance that holds the lease."""
