"""What stands at the keys of the bucket `vm`: records, tombstones, name claims, wishes of nodes."""

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeWish
from virtbus.schemas.records import read_record
from virtbus.schemas.subjects import HOSTS_KEY, JOIN_KEY, RESERVED, WISH_KEY
from virtbus.schemas.vm import NameClaim, Tombstone, VmRecord
from virtbus.schemas.wire import read


def read_vm_key(key: str, value: bytes) -> VmRecord | Tombstone | NameClaim | NodeWish | None:
    """The value of a `$KV.vm…` key by the shape of the key.

    None for what controllers tell a node alone: the join nonce, the addresses of hosts.
    """
    tokens = key.split(".")
    if tokens[-1] in {JOIN_KEY, HOSTS_KEY}:
        return None
    if tokens[-1] == WISH_KEY:
        return read(NodeWish, value)
    if tokens[2] == RESERVED:
        return None
    if len(tokens) == 5:  # $KV.vm._name.<namespace>.<token>
        return read(NameClaim, value)
    return read_record(key, value)


def refuse_foreign(key: str, own: str | bool) -> None:
    """Raise 400 where what stands at `key` says that its place is another (BUS-04)."""
    if key != own:
        message = f"what stands at {key} is not its own"
        raise VirtbusError(Code.INVALID, "foreign_record", message)
