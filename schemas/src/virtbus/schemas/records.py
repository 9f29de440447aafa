"""Values as they are stored: read with the bounds of their kind, refused one at a time."""

from typing import Any, TypeVar

from pydantic import BaseModel

from virtbus.schemas.bounds import bound_of
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import Tombstone, VmRecord
from virtbus.schemas.wire import decode, validate

DELETED = b"deleted"
"""What the purge marker of a record says after a delete; after a move it says nothing."""

Model = TypeVar("Model", bound=BaseModel)


def read_stored(model: type[Model], key: str, value: bytes) -> Model:
    """What stands at a key.

    Raises:
        VirtbusError: 413 larger than its kind may be read; 400 malformed or of another shape; 422
            `newer_schema`: written by a newer virtbus. Nobody can read it until it is replaced.
    """
    return as_stored(model, plain_stored(key, value))


def plain_stored(key: str, value: bytes) -> Any:
    """The same as plain data, of whatever shape."""
    return decode(value, bound_of(key).read_bytes)


def as_stored(model: type[Model], data: Any) -> Model:
    """Plain data as the model of this or an older schema; raises VirtbusError."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    known = model.model_fields["schema_version"].default
    if isinstance(version, int) and version > known:
        message = f"it has schema version {version}, this program knows {known}; upgrade it"
        raise VirtbusError(Code.UNSUPPORTED, "newer_schema", message)
    return validate(model, data)


def read_record(key: str, value: bytes) -> VmRecord | Tombstone:
    """The record, or the tombstone of one.

    Raises:
        VirtbusError: as `read_stored`; 400 `foreign_record`: key and record name two VMs or nodes,
            as when one of them came garbled, so neither is to be believed (BUS-04).
    """
    data = plain_stored(key, value)
    if isinstance(data, dict) and data.get("tombstone"):
        return as_stored(Tombstone, data)
    record = as_stored(VmRecord, data)
    if key.split(".")[2:] != [record.node, record.uid]:
        message = f"what stands at {key} is not its own"
        raise VirtbusError(Code.INVALID, "foreign_record", message)
    return record
