"""A lease: which process may act for all of its kind."""

from virtbus.schemas.model import Fact


class Lease(Fact):
    """`$KV.lease.<role>`: its revision is the fencing token, which never goes back."""

    schema_version: int = 1
    holder: str
    """The instance that holds it."""
