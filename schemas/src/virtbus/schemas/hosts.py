"""A node's host: its identity, the running instance of its agent, and its approved capacity."""

import zlib

from pydantic import Field

from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.wire import encode, read


class HostMarks(LenientModel):
    """Digests that identify a host; they are only compared.

    `key` is the digest of a random key in the agent's state folder. `machine` and `hardware` are
    digests of values that the machine reports, and empty if it reports none.
    """

    key: str
    machine: str = ""
    """Digest of /etc/machine-id."""
    hardware: str = ""
    """Digest of the machine's UUID in the firmware (DMI)."""

    def same(self, other: "HostMarks") -> bool:
        """Return True if the keys are equal, and so is each digest that both have."""
        return (
            self.key == other.key
            and not _differ(self.machine, other.machine)
            and not _differ(self.hardware, other.hardware)
        )


def _differ(own: str, other: str) -> bool:
    return bool(own and other and own != other)


class Instance(LenientModel):
    """One run of a node's agent.

    The key `$KV.st.<node>._instance` has the agent that acts for the node. Each write is a
    compare-and-set over the previous value. The key `$KV.st.<node>._rival` has an agent that was
    refused for the reason `why`, and expires.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    instance: str
    host: HostMarks
    boot: str = ""
    """Boot id of the host; empty if unknown."""
    folder: str = ""
    """Device and inode of the lock file in the state folder. One agent at a time has the lock."""
    hostname: str = ""
    since_ns: int = 0
    token: str = ""
    """Different in each write. So an agent recognises its own write even if its answer was lost."""
    why: str = ""
    second_copy: bytes = b""
    """A mark, the CRC-32 of the fields above as msgpack, and these bytes. It is the last field."""


_MARK = b"\x00\xffcopy"


def encode_twice(instance: Instance) -> bytes:
    """Encode an instance with a second copy of its fields.

    A corrupt byte that TCP's checksum misses would otherwise make the key name another agent.
    """
    body = encode(instance)
    copy = _MARK + zlib.crc32(body).to_bytes(4, "big") + body
    return encode(instance.model_copy(update={"second_copy": copy}))


def read_either(value: bytes) -> Instance:
    """Read an instance from its second copy if that is intact; raises VirtbusError as `read`."""
    copy = value.rpartition(_MARK)[2]
    checksum, body = copy[:4], copy[4:]
    intact = _MARK in value and checksum == zlib.crc32(body).to_bytes(4, "big")
    return read(Instance, body if intact else value)


class Takeover(LenientModel):
    """A person's decision to give the node to the agent `instance`.

    `why` says how the previous host is known to be off. `over` is the revision of the key
    `_instance` at the decision. If the key changes before `instance` has written it, the previous
    agent is back, and the takeover is void.
    """

    instance: str
    over: int = 0
    why: str
    time_ns: int


class Approved(LenientModel):
    """Capacity and labels that a node may offer. Placement ignores reported values beyond them."""

    labels: dict[str, str] = Field(default_factory=dict)
    cpus: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class HostRecord(LenientModel):
    """`$KV.vm.<node>._host`: the approved identity and capacity of a node's host.

    Controllers write the record by compare-and-set: at the node's first heartbeat, then only on a
    person's request. `virtbus up` sets `trusted` on a single host. Such a host has the bus admin's
    credentials, so it could approve itself. Its capacity is used as reported, without approval.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    host: HostMarks | None = None
    takeover: Takeover | None = None
    approved: Approved | None = None
    trusted: bool = False
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the record. A repeat of such a request changes
    nothing."""


class SigningKey(LenientModel):
    """`$KV.sec._signing.<id>`: an HMAC key in hex, with which controllers sign records."""

    schema_version: int = SCHEMA_VERSION
    seed: str
    created_ns: int = 0
