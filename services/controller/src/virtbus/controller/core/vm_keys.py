"""Decodes values of the bucket `vm`: records, claims, node states, named objects."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.image_name import ImageNameRecord
from virtbus.schemas.network_object import NetworkRecord
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.records import (
    read_address_claim,
    read_backup_schedule,
    read_image_name,
    read_network,
    read_record,
    read_security_group,
    read_snapshot,
    read_stored,
    read_volume,
)
from virtbus.schemas.security_group import SecurityGroupRecord
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.subjects import (
    ADDRESS_KEYS,
    BACKUP_SCHEDULE_KEYS,
    HOST_KEY,
    HOSTS_KEY,
    IMAGE_NAME_KEYS,
    JOIN_KEY,
    NETWORK_KEYS,
    NODE_SPEC_KEY,
    OPERATIONS,
    PEER_KEY,
    RESERVED,
    SECURITY_GROUP_KEYS,
    SECURITY_GROUPS,
    SNAPSHOT_KEYS,
    VOLUME_KEYS,
)
from virtbus.schemas.vm import JoinNonce, NameClaim, Tombstone, VmRecord
from virtbus.schemas.volume import VolumeRecord

NamedRecord = (
    VolumeRecord
    | SnapshotRecord
    | ImageNameRecord
    | NetworkRecord
    | SecurityGroupRecord
    | BackupScheduleRecord
)
VmKey = VmRecord | Tombstone | NameClaim | AddressClaim | NodeSpec | NamedRecord


_BY_PREFIX: tuple[tuple[str, Callable[[str, bytes], NamedRecord]], ...] = (
    (VOLUME_KEYS, read_volume),
    (SNAPSHOT_KEYS, read_snapshot),
    (IMAGE_NAME_KEYS, read_image_name),
    (NETWORK_KEYS, read_network),
    (SECURITY_GROUP_KEYS, read_security_group),
    (BACKUP_SCHEDULE_KEYS, read_backup_schedule),
)


_OF_A_NODE = frozenset({OPERATIONS, SECURITY_GROUPS})
"""The kinds of objects whose keys have a node's id before the kind."""
_OF_OTHERS = frozenset({HOST_KEY, HOSTS_KEY, PEER_KEY})


class StoredVm(NamedTuple):
    """A VM's record, and its revision for CAS writes."""

    record: VmRecord
    revision: int

    def order(self) -> tuple[str, str, str]:
        return (self.record.namespace, self.record.name, self.record.uid)

    @property
    def may_release(self) -> bool:
        """Return True if a status may end the VM's delete, or its hold of a volume or address."""
        record = self.record
        return bool(record.deleting or record.detaching or record.address_claims)


class Named(Protocol):
    """A record that has a namespace and a name."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


class Stored(NamedTuple, Generic[NamedT]):
    """A record of a named object, and its revision for CAS writes."""

    record: NamedT
    revision: int

    def order(self) -> tuple[str, str]:
        return (self.record.namespace, self.record.name)


StoredVolume = Stored[VolumeRecord]
StoredSnapshot = Stored[SnapshotRecord]
StoredBackupSchedule = Stored[BackupScheduleRecord]
StoredImageName = Stored[ImageNameRecord]
StoredNetwork = Stored[NetworkRecord]
StoredGroup = Stored[SecurityGroupRecord]


class StoredClaim(NamedTuple):
    """A stored claim of a name or an address."""

    uid: str
    revision: int
    time_ns: int


def read_vm_key(key: str, value: bytes) -> VmKey | None:
    """Return the decoded value at a `$KV.vm` key. The key decides the type.

    Return None for values that other modules decode: host records, host addresses, overlay peers,
    reserved sums, operations and the nodes' security groups. A join record is checked, but also
    gives None. Raise VirtbusError if the value is unreadable.
    """
    tokens = key.split(".")
    if tokens[-1] in _OF_OTHERS or tokens[2] == RESERVED or _OF_A_NODE & {*tokens[3:4]}:
        return None
    if tokens[-1] == JOIN_KEY:
        read_stored(JoinNonce, key, value)
        return None
    if tokens[-1] == NODE_SPEC_KEY:
        return read_stored(NodeSpec, key, value)
    for prefix, read in _BY_PREFIX:
        if key.startswith(prefix):
            return read(key, value)
    if len(tokens) == 5:  # $KV.vm._name.<namespace>.<token>, $KV.vm._addr.<network>.<token>
        address = key.startswith(ADDRESS_KEYS)
        return read_address_claim(key, value) if address else read_stored(NameClaim, key, value)
    return read_record(key, value)
