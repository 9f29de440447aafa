"""References to snapshots in requests to nodes (ADR 0054)."""

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel


class SnapshotRef(LenientModel):
    """The identity of a snapshot in requests to a node."""

    uid: Uid
    namespace: Id
    name: Id

    @property
    def folder(self) -> str:
        """Return the name of the snapshot's folder on a host; unique, because ids have no dots."""
        return f"{self.namespace}.{self.name}.{self.uid}"
