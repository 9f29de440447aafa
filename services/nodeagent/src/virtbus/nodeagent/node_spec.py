"""Follows the node's join record and the node's desired state (ADR 0014)."""

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
    """Compares the nonce in the bus' join record with the nonce of the bus that the node joined."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self.nonce = ""
        """The nonce in the node's join record on the bus; "" if the bus has no such record."""
        self.trusted = False
        """True if the last complete list has the nonce that the node stores. If not, VMs are held.

        Also True if the node has joined no bus and the bus has no join record of the node.
        """

    def take(self, entry: Entry) -> None:
        """Read the join record; raise VirtbusError if the record is unreadable."""
        if entry.kind is EntryKind.PUT:
            # A trusted bus stays trusted if its record becomes unreadable.
            if self.trusted:
                self.nonce = self._files.nonce()
            self.nonce = read_stored(JoinNonce, entry.key, entry.value).nonce
            self.trusted = self.trusted and self.nonce == self._files.nonce()

    def synced(self) -> bool:
        """Decide at the end of a list if the bus is trusted; log an error if it is not trusted.

        If the node has joined no bus and the list has a join record, the node joins this bus.
        """
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
    """Keeps the listed value of `$KV.vm.<node>._spec`, the node's desired state."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._node_spec: NodeSpec | None = None
        self._listed = False

    @property
    def fence(self) -> str:
        """Return the reason why the node starts no guest; "" if the node is not fenced (F25)."""
        node_spec = self._node_spec
        if node_spec is None or node_spec.fenced is None:
            return ""
        return FENCED.format(why=node_spec.fenced.why, node=node_spec.node)

    @property
    def closed(self) -> str:
        """Return the reason why a cordoned or drained node starts no new VM.

        Return "" if the node is schedulable or fenced.
        """
        return (
            self._node_spec.closed
            if self._node_spec is not None and self._node_spec.fenced is None
            else ""
        )

    def reset(self) -> None:
        self._listed = False

    def take(self, entry: Entry) -> None:
        """Take the value on the bus.

        Raises:
            VirtbusError: the value is unreadable. The last known value stays, so a fence stays.
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
        """End the list. A node without a value in the list has no desired state."""
        if not self._listed:
            self._node_spec = None

    def keep(self) -> None:
        """Write the value of the joined bus to disk, from where a rebuilt bus can get it."""
        self._files.set_node_spec(self._node_spec)
