"""What stands at a VM's key, `$KV.vm.<node>.<uid>`."""

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import Tombstone, VmRecord
from virtbus.schemas.wire import decode, validate

DELETED = b"deleted"
"""What the purge marker of a record says after a delete; after a move it says nothing."""


def read_record(key: str, value: bytes) -> VmRecord | Tombstone:
    """The record, or the tombstone of one.

    Raises:
        VirtbusError: 400 `invalid`; 400 `foreign_record`: key and record name two VMs or nodes, as
            when one of them came garbled, so neither is to be believed (BUS-04).
    """
    data = decode(value)
    if isinstance(data, dict) and data.get("tombstone"):
        return validate(Tombstone, data)
    record = validate(VmRecord, data)
    if key.split(".")[2:] != [record.node, record.uid]:
        message = f"what stands at {key} is not its own"
        raise VirtbusError(Code.INVALID, "foreign_record", message)
    return record
