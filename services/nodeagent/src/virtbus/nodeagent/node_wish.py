"""The desired state of this node on the joined bus: cordoned, drained, fenced (ADR 0014)."""

from virtbus.bus.ports import Entry, EntryKind
from virtbus.nodeagent.core.ports import RecordFiles
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeWish
from virtbus.schemas.records import read_stored

FENCED = (
    "the node was declared off ({why}): nothing is started here until `virtbus node unfence {node}`"
)


class WishHere:
    """`$KV.vm.<node>._wish` as last listed; `keep` writes it to disk for a rebuilt bus."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._wish: NodeWish | None = None
        self._listed = False

    @property
    def fence(self) -> str:
        """Return why nothing is started here: this node is fenced (F25)."""
        wish = self._wish
        if wish is None or wish.fenced is None:
            return ""
        return FENCED.format(why=wish.fenced.why, node=wish.node)

    @property
    def closed(self) -> str:
        """Return why no new VM is started here: the node is cordoned or drained."""
        return self._wish.closed if self._wish is not None and self._wish.fenced is None else ""

    def reset(self) -> None:
        """Start a list; a key that it lacks requests nothing."""
        self._listed = False

    def take(self, entry: Entry) -> None:
        """Apply the bus' value.

        Raises VirtbusError for an unreadable value. Then the last one stays, above all a fence.
        """
        self._listed = True
        try:
            put = entry.kind is EntryKind.PUT
            wish = read_stored(NodeWish, entry.key, entry.value) if put else None
        except VirtbusError:
            self._wish = self._wish or self._files.wish()
            raise
        self._wish = None if wish is None or wish.idle else wish

    def synced(self) -> None:
        """End the list."""
        if not self._listed:
            self._wish = None

    def keep(self) -> None:
        """Write it to disk: the bus is the joined one."""
        self._files.set_wish(self._wish)
