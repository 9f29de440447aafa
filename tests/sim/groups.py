"""Observes security groups: no rule is lost or invented, on the bus and on hosts (ADR 0069)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tests.sim.machine import Host

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.security_groups import Membership, SecurityGroups
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.schemas import subjects
from virtbus.schemas.records import (
    group_of_node_group,
    of_node_group,
    read_node_group,
    read_security_group,
)
from virtbus.schemas.security_group import GroupSpec, NodeGroup, SecurityGroupRecord, selects
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import read

if TYPE_CHECKING:
    from tests.sim.observer import Observer


class GroupObserver:
    """All groups that the bus had, the keys of nodes, and the rules of networks on hosts."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._there: dict[str, SecurityGroupRecord] = {}
        self._had: dict[tuple[str, int], GroupSpec] = {}
        """By uid and generation: the rules that a user has set."""
        self._on_nodes: dict[str, NodeGroup] = {}
        self._since: dict[str, tuple[VmRecord, int]] = {}
        """By uid: the newest record of a VM, and the first revision that had its content."""

    # --- the bus --------------------------------------------------------------------------
    def wrote(self, entry: Entry) -> None:
        """A group, or the value of a node, was written or ended."""
        if of_node_group(entry.key):
            self._node_wrote(entry)
        elif entry.kind is EntryKind.PUT:
            record = read_security_group(entry.key, entry.value)
            self._there[entry.key] = record
            self._had[record.uid, record.generation] = record.spec
        else:
            self._there.pop(entry.key, None)

    def _node_wrote(self, entry: Entry) -> None:
        if entry.kind is EntryKind.PUT:
            group = read_node_group(entry.key, entry.value)
            self._on_nodes[entry.key] = group
            if self._had.get((group.uid, group.generation)) != group.spec:
                self._observer.wrong("I2", f"{entry.key} has rules that no user has set")
            return
        ended = self._on_nodes.pop(entry.key, None)
        node, key = group_of_node_group(entry.key)
        now = self._there.get(key)
        if ended is None or now is None or now.uid != ended.uid:
            return
        for record in self._records():
            lost = selects(ended, record) and selects(now, record)
            if record.node == node and not record.ending and lost:
                self._observer.wrong("I2", f"{entry.key} ended while {record.uid} needs it")

    def recorded(self, record: VmRecord, revision: int) -> None:
        """A VM's record was written. One with the same content tells a node nothing new."""
        before = self._since.get(record.uid)
        if before is None or before[0] != record:
            self._since[record.uid] = record, revision

    def _records(self) -> list[VmRecord]:
        seen = self._observer.vms.values()
        return [one.record for one in seen if one.record is not None]

    # --- hosts ----------------------------------------------------------------------------
    def ruled(self, host: Host, record: VmRecord, groups: Mapping[str, NodeGroup]) -> None:
        """A network got the rules of its groups: all that were written before its record."""
        shelf = self._observer.server.shelf("$KV.vm.x")
        own = shelf.entries.get(subjects.vm_record(host.node, record.uid))
        if own is None or own.kind is not EntryKind.PUT or read(VmRecord, own.value) != record:
            return  # a newer record follows
        _, revision = self._since[record.uid]
        for key, entry in shelf.entries.items():
            if not of_node_group(key) or entry.kind is not EntryKind.PUT:
                continue
            if group_of_node_group(key)[0] != host.node or entry.revision > revision:
                continue
            wanted = read_node_group(key, entry.value)
            if selects(wanted, record) and groups.get(key) != wanted:
                self._observer.wrong("I2", f"{host.name}: {record.uid} is without {key}")

    # --- after all is healed --------------------------------------------------------------
    def at_rest(self) -> Iterator[tuple[str, str]]:
        """Yield keys of nodes that differ from groups and VMs, and networks with other rules."""
        wanted = self._wanted()
        for key, group in wanted.items():
            if self._on_nodes.get(key) != group:
                there = self._on_nodes.get(key)
                named = _named({} if there is None else {key: there})
                yield "I8", f"{key} is {named}, and should be {_named({key: group})}"
        for key in self._on_nodes.keys() - wanted.keys():
            if group_of_node_group(key)[1] not in self._there:
                yield "I5", f"{key} is of a group that has ended"
        for record in self._records():
            host = self._observer.hosts.get(record.node)
            if host is None or record.uid not in host.networks or record.ending:
                continue
            has = host.rules[record.uid][1]
            should = {
                key: group
                for key, group in wanted.items()
                if group_of_node_group(key)[0] == record.node and selects(group, record)
            }
            if has != should:
                told = f"{record.uid} has {_named(has)}, and not {_named(should)}"
                yield "I8", f"{host.name}: {told}"

    def _wanted(self) -> dict[str, NodeGroup]:
        groups = SecurityGroups()
        for key, entry in self._observer.entries(subjects.SECURITY_GROUP_KEYS).items():
            groups.put(key, entry.value, entry.revision)
        statuses = {}
        for key, entry in self._observer.entries("$KV.st.").items():
            if "._" not in key:
                status = read(VmStatus, entry.value)
                statuses[status.node, status.uid] = status, entry.revision
        vms = [StoredVm(record, 0) for record in self._records()]
        return dict(Membership(vms, statuses, groups).wanted())


def _named(groups: Mapping[str, NodeGroup]) -> list[str]:
    found = groups.values()
    return sorted(f"{one.name}/{one.uid[-6:]}/{one.generation} {one.peers}" for one in found)
