"""References to snapshots in requests to nodes (ADR 0054)."""

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel


class SnapshotRef(LenientModel):
    """A snapshot as requests to a node name it."""

    uid: Uid
    namespace: Id
    name: Id

    @property
    def folder(self) -> str:
        """Return the name of its folder on a host. Ids contain no dots, so it is unique."""
        return f"{self.namespace}.{self.name}.{self.uid}"
