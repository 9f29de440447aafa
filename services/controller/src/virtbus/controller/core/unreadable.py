"""Tracks unreadable values on the bus, and shows them to people (ADR 0027)."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.records import of_node_group, of_operation
from virtbus.schemas.states import VmState
from virtbus.schemas.subjects import (
    ADDRESSES,
    BACKUP_SCHEDULES,
    HOSTS_KEY,
    IMAGE_NAMES,
    IMAGES_KEY,
    JOIN_KEY,
    NETWORKS,
    NODE_SPEC_KEY,
    PEER_KEY,
    POOLS_KEY,
    SECURITY_GROUPS,
    SNAPSHOTS,
    VOLUMES,
)
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.vm_status import Condition, VmView

CONDITION = "Unreadable"
NAMED_IN_ALARM = 5
_KINDS = {"st": "status", "node": "heartbeat", "sec": "secret inputs", "lease": "lease"}
_NODE_WIDE = {
    JOIN_KEY: "join record",
    HOSTS_KEY: "list of hosts' addresses",
    PEER_KEY: "overlay peer",
    NODE_SPEC_KEY: "node_spec",
    IMAGES_KEY: "list of images",
    POOLS_KEY: "list of pools",
}
_PLACES = {
    "_name": "name claim",
    VOLUMES: "volume",
    SNAPSHOTS: "snapshot",
    IMAGE_NAMES: "image name",
    NETWORKS: "network",
    SECURITY_GROUPS: "security group",
    BACKUP_SCHEDULES: "backup schedule",
    ADDRESSES: "address claim",
}

_WAYS_OUT = {
    "record": "`virtbus bus rebuild` writes it back from its host, `virtbus vm delete {uid}` ends "
    "the VM",
    "status": "its node writes it again within some minutes; if the VM is gone, `virtbus vm delete "
    "{uid}` removes it",
    "name claim": "`virtbus vm delete NAME` frees the name",
    "volume": "`virtbus volume delete NAME` frees the name; data that this controller does not "
    "know stays on its node",
    "snapshot": "`virtbus snapshot delete NAME` frees the name; data that this controller does "
    "not know stays on its node",
    "image name": "`virtbus imagename set` replaces it, `virtbus imagename delete` removes it",
    "network": "`virtbus network delete NAME` frees the name, if no VM uses it",
    "security group": "`virtbus security-group delete NAME` removes it",
    "backup schedule": "`virtbus backup schedule delete NAME` frees the name; backups stay",
    "address claim": "the next sweep writes it again if a VM has the address",
    "join record": "`virtbus bus rebuild` makes it again",
    "node_spec": "`virtbus node fence` or `unfence` replaces it",
}
"""The next step for a person, by kind of value."""


class Unreadable(NamedTuple):
    """An unreadable value: its key, revision and size, and the error."""

    key: str
    revision: int
    size_bytes: int
    reason: str
    why: str

    @property
    def uid(self) -> str:
        """Return the last token of the key: the VM's uid, or a name such as `_spec`."""
        return self.key.rpartition(".")[2]

    @property
    def kind(self) -> str:
        """Return the kind of value that belongs at the key."""
        _, bucket, place, *_ = self.key.split(".")
        if of_operation(self.key):
            return "operation" if bucket == "vm" else "operation's status"
        if of_node_group(self.key):
            return "security group of a node"
        if self.uid.startswith("_"):
            return _NODE_WIDE.get(self.uid, "value")
        if bucket != "vm":
            return _KINDS.get(bucket, "value")
        return _PLACES.get(place, "record")

    @property
    def way_out(self) -> str:
        return _WAYS_OUT.get(self.kind, "its writer writes it again").format(uid=self.uid)


class UnreadableValueError(VirtbusError):
    """The error 422: a value that a request needs cannot be read."""

    def __init__(self, found: Unreadable) -> None:
        message = f"the {found.kind} at {found.key} cannot be read ({found.why}); {found.way_out}"
        super().__init__(Code.UNSUPPORTED, "unreadable", message)
        self.found = found


class Damaged:
    """The unreadable values from watches, until each is replaced or purged."""

    def __init__(self) -> None:
        self._found: dict[str, Unreadable] = {}

    def add(self, found: Unreadable) -> bool:
        """Add an unreadable value; return False if it is already known."""
        if self._found.get(found.key) == found:
            return False
        self._found[found.key] = found
        return True

    def discard(self, key: str) -> None:
        """Remove an unreadable value, because its key was replaced or purged."""
        self._found.pop(key, None)

    def has(self, key: str) -> bool:
        return key in self._found

    def record_of(self, uid: str) -> bool:
        """Return True if a VM's record is unreadable: a CAS at its last readable revision fails."""
        return bool(self._found) and any(one.kind == "record" for one in self.of(uid))

    def nodes_of_records(self) -> set[str]:
        """Return the nodes that have a VM with an unreadable record."""
        return {one.key.split(".")[2] for one in self if one.kind == "record"}

    def in_bucket(self, bucket: str) -> set[str]:
        return {key for key in self._found if key.startswith(f"$KV.{bucket}.")}

    def of(self, uid: str) -> list[Unreadable]:
        """Return the unreadable values of a VM, such as its record and its status."""
        return [found for found in self if found.uid == uid]

    def claims(self) -> list[Unreadable]:
        return [found for found in self if found.kind in {"name claim", "address claim"}]

    def statuses(self) -> list[Unreadable]:
        return [found for found in self if found.kind == "status"]

    def __iter__(self) -> Iterator[Unreadable]:
        return iter(tuple(self._found.values()))

    def alarms(self) -> tuple[str, ...]:
        """Return a sentence for each of the first NAMED_IN_ALARM values, and one for the others."""
        if not self._found:
            return ()
        found = sorted(self)
        texts = [f"{one.key} cannot be read ({one.why}): {one.way_out}" for one in found]
        more = len(texts) - NAMED_IN_ALARM
        rest = [f"{more} more values on the bus cannot be read: dead letters name them"]
        return tuple(texts[:NAMED_IN_ALARM] + (rest if more > 0 else []))

    def shown(self, view: VmView) -> VmView:
        if not self._found:
            return view
        found = [one for one in self.of(view.uid) if one.kind != "status" or _own(one, view)]
        return view.model_copy(update={"conditions": view.conditions + _conditions(found)})


def _own(found: Unreadable, view: VmView) -> bool:
    """Return True if the VM's own node wrote the status."""
    return found.key.split(".")[2] == view.node


def _conditions(found: Iterable[Unreadable]) -> tuple[Condition, ...]:
    return tuple(
        Condition(
            type=CONDITION,
            status=True,
            reason=one.reason,
            message=f"its {one.kind} cannot be read ({one.why}): {one.way_out}",
        )
        for one in found
    )


def removed(found: Unreadable, *, uid: str, namespace: str, name: str) -> VmView:
    """Return the answer to a delete of a VM whose record was unreadable."""
    node = found.key.split(".")[2] if found.kind in {"record", "status"} else UNPLACED
    return VmView(
        uid=uid,
        namespace=namespace,
        name=name,
        node=node,
        epoch=0,
        generation=0,
        revision=found.revision,
        created_ns=0,
        state=VmState.DELETING,
        reason="unreadable",
        message=f"its {found.kind} could not be read ({found.why}) and is removed",
        deleting=True,
        spec=VmSpec(),
    )
