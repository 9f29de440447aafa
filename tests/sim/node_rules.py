"""Security groups on a simulated host: netd's own book and watch, and a dictionary for nftables."""

from tests.sim.machine import Host

from virtbus.bus.client.ports import Entry, WatchMark
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.group_watch import GroupWatch
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.subjects import node_group
from virtbus.schemas.vm import VmRecord


class NodeRules:
    """The groups of one netd, from the bus to the rules of each network."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._book = NodeGroupBook()
        self._watch = GroupWatch(self._book)
        for key, (nonce, group) in host.disk.groups.items():
            self._book.groups[key] = group
            self._book.nonces[key] = nonce

    def see(self, item: Entry | WatchMark) -> bool:
        """Process an item of the watch; return True if something has to be applied."""
        return bool(self._watch.see(item))

    def apply(self) -> None:
        """On the host: the groups are durable, and in force for all networks."""
        nonces = self._book.nonces
        self._host.disk.groups = {
            key: (nonces.get(key, ""), group) for key, group in self._book.groups.items()
        }
        for record, _ in list(self._host.rules.values()):
            self._enforce(record)

    def attach(self, record: VmRecord) -> None:
        """On the host: a VM's network has the rules of its groups."""
        self._host.watcher.ruled(self._host, record, self._enforce(record))

    def _enforce(self, record: VmRecord) -> dict[str, NodeGroup]:
        node, found = self._host.node, self._book.of_vm(record)
        groups = {node_group(node, one.namespace, one.name): one for one in found}
        self._host.rules[record.uid] = record, groups
        return groups
