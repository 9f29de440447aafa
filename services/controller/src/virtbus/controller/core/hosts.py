"""Caches, by node, the host's identity and capacity, the join, other hosts, and refused agents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from virtbus.controller.core.approval import beyond, offered
from virtbus.controller.core.node_values import NodeValues
from virtbus.schemas import subjects
from virtbus.schemas.hosts import HostRecord, Instance
from virtbus.schemas.ids import is_id
from virtbus.schemas.node import HostAddresses, NodeRecord
from virtbus.schemas.overlay import OverlayPeer
from virtbus.schemas.records import refuse_foreign
from virtbus.schemas.subjects import HOSTS_KEY, JOIN_KEY, PEER_KEY
from virtbus.schemas.wire import read

RIVAL_FRESH_S = 20.0
"""A refused agent that is silent for this time is forgotten. It repeats its message every 5 s."""
RIVALS_KEPT = 8
"""Limit of refused agents for one node: many hosts may have copies of the node's credentials."""


class Rival(NamedTuple):
    """A refused agent, and the time of its last message on this process's clock."""

    instance: Instance
    heard_s: float


@dataclass
class Hosts:
    """The hosts of nodes, from heartbeats and the nodes' keys in `vm` and `st`."""

    records: dict[str, tuple[HostRecord | None, int]] = field(default_factory=dict)
    """By node: the record (None if it was purged), and the key's revision."""
    joined: set[str] = field(default_factory=set)
    """Nodes with a join record. They belong to the fleet until `node forget`, even while off."""
    reported: dict[str, tuple[NodeRecord, Mapping[str, Any]]] = field(default_factory=dict)
    """By node: the last heartbeat as reported, as a model and as plain data."""
    rivals: dict[str, dict[str, Rival]] = field(default_factory=dict)
    addresses: NodeValues[HostAddresses] = field(default_factory=lambda: NodeValues(HostAddresses))
    peers: NodeValues[OverlayPeer] = field(default_factory=lambda: NodeValues(OverlayPeer))

    def put(self, key: str, value: bytes, revision: int) -> str:
        """Process a host record.

        Return the node, or raise VirtbusError if the record does not match its key.
        """
        record = read(HostRecord, value)
        refuse_foreign(key, is_id(record.node) and subjects.node_host(record.node))
        self.took(record.node, record, revision)
        return record.node

    def took(self, node: str, record: HostRecord | None, revision: int) -> None:
        """Store a host record, unless the same or a higher revision is known."""
        if self.revision(node) < revision:
            self.records[node] = (record, revision)

    def forget(self, key: str) -> str:
        """Process the end of a `_join` or `_host` key; return its node."""
        node, kind = key.split(".")[2:4]
        if kind == JOIN_KEY:
            self.joined.discard(node)
        else:
            self.records.pop(node, None)
        return node

    def record(self, node: str) -> HostRecord | None:
        return self.records.get(node, (None, 0))[0]

    def revision(self, node: str) -> int:
        return self.records.get(node, (None, 0))[1]

    def values_at(self, key: str) -> NodeValues[HostAddresses] | NodeValues[OverlayPeer] | None:
        """Return the values to which a key belongs; None for the keys of other values."""
        if key.endswith(f".{HOSTS_KEY}"):
            return self.addresses
        return self.peers if key.endswith(f".{PEER_KEY}") else None

    def put_rival(self, key: str, value: bytes, now_s: float) -> None:
        """Process the message of a refused agent."""
        instance = read(Instance, value)
        refuse_foreign(key, is_id(instance.node) and subjects.node_rival(instance.node))
        there = self.rivals.setdefault(instance.node, {})
        for name, one in list(there.items()):
            if (one.instance.host, one.instance.folder) == (instance.host, instance.folder):
                del there[name]  # a previous run of the same agent
        there[instance.instance] = Rival(instance, now_s)
        while len(there) > RIVALS_KEPT:
            del there[next(iter(there))]

    def forget_old(self, now_s: float) -> None:
        """Forget the refused agents that have become silent."""
        for node, there in list(self.rivals.items()):
            for name in [n for n, one in there.items() if now_s - one.heard_s > RIVAL_FRESH_S]:
                del there[name]
            if not there:
                del self.rivals[node]

    def waiting(self, node: str) -> tuple[Instance, ...]:
        """Return the agents that were refused and have not become silent."""
        return tuple(one.instance for one in self.rivals.get(node, {}).values())

    def offered(self, node: str) -> tuple[NodeRecord, Mapping[str, Any]]:
        """Return the last heartbeat, limited to approved values, as a model and as plain data."""
        record, plain = self.reported[node]
        may = offered(record, self.record(node))
        return may, plain if may is record else {**plain, "labels": may.labels}

    def shown(self, node: str) -> dict[str, Any]:
        """Return the fields of `NodeView` that describe the node's host."""
        host, last = self.record(node), self.reported.get(node)
        return {
            "approved": host.approved if host is not None else None,
            "unapproved": beyond(last[0], host) if last is not None else (),
            "rivals": self.waiting(node),
        }

    def alarms(self) -> tuple[str, ...]:
        """Return problems that need a person."""
        return (*self._rivalries(), *self._strangers())

    def _rivalries(self) -> list[str]:
        return [
            f"{node}: a second agent with its id or credentials, on {one.hostname or 'a host'} "
            f"({one.instance}), is kept out: {one.why}; stop it, or see virtbus node takeover"
            for node in sorted(self.rivals)
            for one in self.waiting(node)
        ]

    def _strangers(self) -> list[str]:
        """Return an alarm for each node whose heartbeat comes from another host than recorded."""
        found = []
        for node, (record, _) in sorted(self.reported.items()):
            host = self.record(node)
            if host and host.host and record.host and not record.host.same(host.host):
                found.append(
                    f"{node}: its heartbeat comes from another host, {record.hostname}; "
                    f"are its credentials stolen? virtbus bus revoke-node {node}"
                )
        return found
