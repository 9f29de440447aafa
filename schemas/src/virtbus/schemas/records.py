"""Stored values: read with the limits of their kind, and refused one at a time."""

from typing import Any, TypeVar

from pydantic import BaseModel

from virtbus.schemas.bounds import LEAST_READ_BYTES, bound_of
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.version import check_version
from virtbus.schemas.vm import Tombstone, VmRecord
from virtbus.schemas.wire import decode, validate

DELETED = b"deleted"
"""The content of a record's purge marker after a delete; after a move it is empty."""

Model = TypeVar("Model", bound=BaseModel)


def read_stored(model: type[Model], key: str, value: bytes) -> Model:
    """Return the value of a key.

    Raises:
        VirtbusError: 413 larger than its kind may be read; 400 malformed or of another shape; 422
            `newer_schema` or `older_schema`: written by another virtbus. Nobody can read it until
            it is replaced.
    """
    return as_stored(model, plain_stored(key, value))


def plain_stored(key: str, value: bytes) -> Any:
    """Return the value as plain data of any shape."""
    if len(value) <= LEAST_READ_BYTES:
        return decode(value)
    return decode(value, bound_of(key).read_bytes)


def as_stored(model: type[Model], data: Any) -> Model:
    """Return plain data as the model of this schema version; raises VirtbusError."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int):
        check_version("it", version, reasons=("older_schema", "newer_schema"))
    return validate(model, data)


def read_record(key: str, value: bytes) -> VmRecord | Tombstone:
    """Return a record, or its tombstone.

    Raises:
        VirtbusError: as `read_stored`; 400 `foreign_record`: key and record name different VMs or
            nodes, for example after corruption, so neither is trusted (BUS-04).
    """
    data = plain_stored(key, value)
    if isinstance(data, dict) and data.get("tombstone"):
        return as_stored(Tombstone, data)
    record = as_stored(VmRecord, data)
    if key.split(".")[2:] != [record.node, record.uid]:
        message = f"what stands at {key} is not its own"
        raise VirtbusError(Code.INVALID, "foreign_record", message)
    return record
