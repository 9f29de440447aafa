"""Follows the two records of the node itself: the join record, and the desired state (ADR 0014)."""

import logging

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.nodeagent.core.ports import RecordFiles
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import JoinNonce

log = logging.getLogger(__name__)

FENCED = (
    "the node was declared off ({why}): nothing is started here until `virtbus node unfence {node}`"
)
OTHER_BUS = (
    "this bus is not the one that the node joined: its VMs are held, nothing is started or ended; "
    "`virtbus bus rebuild` restores the bus from the hosts"
)


class JoinCheck:
    """Compares the join record of the listed bus with the one of the bus that the node joined."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self.nonce = ""
        """The listed one."""
        self.trusted = False
        """The bus is the joined one, and was listed completely: only then VMs leave hold."""

    def take(self, entry: Entry) -> None:
        """Take the join record; raises VirtbusError for an unreadable one."""
        if entry.kind is EntryKind.PUT:
            if self.trusted:  # an unreadable one does not make it another bus
                self.nonce = self._files.nonce()
            self.nonce = read_stored(JoinNonce, entry.key, entry.value).nonce
            self.trusted = self.trusted and self.nonce == self._files.nonce()

    def synced(self) -> bool:
        """Decide at the end of a list if the bus is trusted; report if it is not."""
        joined = self._files.nonce()
        if joined == "" and self.nonce:
            self._files.set_nonce(self.nonce)
            joined = self.nonce
        self.trusted = joined == self.nonce
        if not self.trusted:
            why = "it has another join record" if self.nonce else "its list has no join record"
            log.error("%s (%s)", OTHER_BUS, why, extra={"code": "other_bus"})
        return self.trusted


class NodeSpecFollower:
    """`$KV.vm.<node>._spec` as last listed; `keep` writes it to disk for a rebuilt bus."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._node_spec: NodeSpec | None = None
        self._listed = False

    @property
    def fence(self) -> str:
        """Return why nothing is started here: this node is fenced (F25)."""
        node_spec = self._node_spec
        if node_spec is None or node_spec.fenced is None:
            return ""
        return FENCED.format(why=node_spec.fenced.why, node=node_spec.node)

    @property
    def closed(self) -> str:
        """Return why no new VM is started here: the node is cordoned or drained."""
        return (
            self._node_spec.closed
            if self._node_spec is not None and self._node_spec.fenced is None
            else ""
        )

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
            node_spec = read_stored(NodeSpec, entry.key, entry.value) if put else None
        except VirtbusError:
            self._node_spec = self._node_spec or self._files.node_spec()
            raise
        self._node_spec = None if node_spec is None or node_spec.idle else node_spec

    def synced(self) -> None:
        """End the list."""
        if not self._listed:
            self._node_spec = None

    def keep(self) -> None:
        """Write it to disk: the bus is the joined one."""
        self._files.set_node_spec(self._node_spec)
