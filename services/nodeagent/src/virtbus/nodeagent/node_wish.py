"""What is wanted of this node, by the bus that it joined: cordoned, drained, fenced (ADR 0014)."""

from virtbus.bus.ports import Entry, EntryKind
from virtbus.nodeagent.core.ports import RecordFiles
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeWish
from virtbus.schemas.records import read_stored

FENCED = (
    "the node was declared off ({why}): nothing is started here until `virtbus node unfence {node}`"
)


class WishHere:
    """`$KV.vm.<node>._wish` as it was listed last; `keep` puts it on disk for a bus made anew."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._wish: NodeWish | None = None
        self._listed = False

    @property
    def fence(self) -> str:
        """Why nothing is started here: this node was declared off (F25)."""
        wish = self._wish
        if wish is None or wish.fenced is None:
            return ""
        return FENCED.format(why=wish.fenced.why, node=wish.node)

    @property
    def closed(self) -> str:
        """Why no new VM is begun here: the node is cordoned or drained."""
        return self._wish.closed if self._wish is not None and self._wish.fenced is None else ""

    def reset(self) -> None:
        """A list begins; what it does not name is wanted no more."""
        self._listed = False

    def take(self, entry: Entry) -> None:
        """What the bus says now.

        Raises VirtbusError for what cannot be read: then the last wish stands, a fence above all.
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
        """The list is complete."""
        if not self._listed:
            self._wish = None

    def keep(self) -> None:
        """The bus is the one that was joined: its wish outlives it."""
        self._files.set_wish(self._wish)
