"""Reads stored values within the size limit of their kind; an invalid value raises VirtbusError."""

from typing import Any, TypeVar

from pydantic import BaseModel

from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.bounds import LEAST_READ_BYTES, bound_of
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image_name import ImageNameRecord
from virtbus.schemas.network_object import NetworkRecord
from virtbus.schemas.operation import OperationRecord, OperationStatus
from virtbus.schemas.security_group import NodeGroup, SecurityGroupRecord
from virtbus.schemas.snapshot import SnapshotRecord
from virtbus.schemas.subjects import (
    OPERATIONS,
    SECURITY_GROUP_KEYS,
    SECURITY_GROUPS,
    address_claim,
    backup_schedule_record,
    claimed_address,
    image_name,
    network_record,
    node_group,
    operation_record,
    operation_status,
    security_group,
    snapshot_record,
    volume_record,
)
from virtbus.schemas.version import check_version
from virtbus.schemas.vm import Tombstone, VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import decode, validate

DELETED = b"deleted"
"""The content of the purge marker that a delete leaves. The marker of a move is empty."""

Model = TypeVar("Model", bound=BaseModel)


def read_stored(model: type[Model], key: str, value: bytes) -> Model:
    """Return the bytes `value`, stored at `key`, as `model`.

    Raises:
        VirtbusError: 413 if the value is larger than the read limit of its kind; 400 if it is
            malformed or not a `model`; 422 `newer_schema` or `older_schema` if another version of
            virtbus wrote it.
    """
    return as_stored(model, plain_stored(key, value))


def plain_stored(key: str, value: bytes) -> Any:
    """Decode a stored value of any shape; raises VirtbusError 413 or 400 as `read_stored`."""
    if len(value) <= LEAST_READ_BYTES:
        return decode(value)
    return decode(value, bound_of(key).read_bytes)


def as_stored(model: type[Model], data: Any) -> Model:
    """Return decoded data as `model`; raises VirtbusError 400 or 422 as `read_stored`."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int):
        check_version("it", version, reasons=("older_schema", "newer_schema"))
    return validate(model, data)


def read_record(key: str, value: bytes) -> VmRecord | Tombstone:
    """Return the record or tombstone at `key`.

    Raises:
        VirtbusError: an error of `read_stored`, or 400 `foreign_record` if the record is of another
            VM or node than the key. Then neither the key nor the record is trusted (BUS-04).
    """
    data = plain_stored(key, value)
    if isinstance(data, dict) and data.get("tombstone"):
        return as_stored(Tombstone, data)
    record = as_stored(VmRecord, data)
    own = key.split(".")[2:] == [record.node, record.uid]
    refuse_foreign(key, own and key)
    return record


def read_volume(key: str, value: bytes) -> VolumeRecord:
    """Return the volume at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(VolumeRecord, key, value)
    refuse_foreign(key, volume_record(record.namespace, record.name))
    return record


def read_snapshot(key: str, value: bytes) -> SnapshotRecord:
    """Return the snapshot at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(SnapshotRecord, key, value)
    refuse_foreign(key, snapshot_record(record.namespace, record.name))
    return record


def read_image_name(key: str, value: bytes) -> ImageNameRecord:
    """Return the image name at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(ImageNameRecord, key, value)
    refuse_foreign(key, image_name(record.namespace, record.name))
    return record


def read_backup_schedule(key: str, value: bytes) -> BackupScheduleRecord:
    """Return the schedule at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(BackupScheduleRecord, key, value)
    refuse_foreign(key, backup_schedule_record(record.namespace, record.name))
    return record


def read_network(key: str, value: bytes) -> NetworkRecord:
    """Return the network at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(NetworkRecord, key, value)
    refuse_foreign(key, network_record(record.namespace, record.name))
    return record


def read_security_group(key: str, value: bytes) -> SecurityGroupRecord:
    """Return the security group at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(SecurityGroupRecord, key, value)
    refuse_foreign(key, security_group(record.namespace, record.name))
    return record


def of_node_group(key: str) -> bool:
    """Return True for the key of a `NodeGroup`."""
    tokens = key.split(".")
    return len(tokens) == 6 and tokens[3] == SECURITY_GROUPS


def group_of_node_group(key: str) -> tuple[str, str]:
    """Return the node in the key of a `NodeGroup`, and the key of the group's own record."""
    _, _, node, _, namespace, token = key.split(".")
    return node, f"{SECURITY_GROUP_KEYS}{namespace}.{token}"


def read_node_group(key: str, value: bytes) -> NodeGroup:
    """Return the `NodeGroup` at `key`; raises VirtbusError as `read_record`."""
    group = read_stored(NodeGroup, key, value)
    refuse_foreign(key, node_group(key.split(".")[2], group.namespace, group.name))
    return group


def read_address_claim(key: str, value: bytes) -> AddressClaim:
    """Return the claim of an address at `key`; raises VirtbusError as `read_record`."""
    claim = read_stored(AddressClaim, key, value)
    try:
        own = address_claim(*claimed_address(key))
    except ValueError:
        own = ""
    refuse_foreign(key, own)
    return claim


def of_operation(key: str) -> bool:
    """Return True for the key of an operation or of its status."""
    tokens = key.split(".")
    return len(tokens) == 5 and tokens[3] == OPERATIONS


def read_operation(key: str, value: bytes) -> OperationRecord:
    """Return the operation at `key`; raises VirtbusError as `read_record`."""
    record = read_stored(OperationRecord, key, value)
    refuse_foreign(key, operation_record(record.node, record.id))
    return record


def read_operation_status(key: str, value: bytes) -> OperationStatus:
    """Return the status of an operation at `key`; raises VirtbusError as `read_record`."""
    status = read_stored(OperationStatus, key, value)
    refuse_foreign(key, operation_status(status.node, status.id))
    return status


def refuse_foreign(key: str, own: str | bool) -> None:
    """Raise 400 if the content of the value at `key` belongs at another key, `own` (BUS-04)."""
    if key != own:
        message = f"the value at {key} belongs to another key"
        raise VirtbusError(Code.INVALID, "foreign_record", message)
