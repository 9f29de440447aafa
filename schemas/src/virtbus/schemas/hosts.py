"""A node's host: its identity, the running instance of its agent, and its approved capacity."""

from pydantic import Field

from virtbus.schemas.model import SCHEMA_VERSION, LenientModel


class HostMarks(LenientModel):
    """Digests that identify a host; they are only compared.

    `key` is of a random key in the agent's state folder. The others are of values that the machine
    reports, and empty if it reports none.
    """

    key: str
    machine: str = ""
    """Digest of /etc/machine-id."""
    hardware: str = ""
    """Digest of the firmware's UUID of the machine (DMI)."""

    def same(self, other: "HostMarks") -> bool:
        """Return True unless a mark shows that the two are different hosts."""
        own, others = (self.machine, self.hardware), (other.machine, other.hardware)
        differ = any(a and b and a != b for a, b in zip(own, others, strict=True))
        return self.key == other.key and not differ


class Instance(LenientModel):
    """One life of a node's agent.

    At `$KV.st.<node>._instance` it is the agent that acts for the node; each write is a
    compare-and-set over the previous one. At `$KV.st.<node>._rival` it is an agent that was
    refused, with `why`; that key expires.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    instance: str
    host: HostMarks
    boot: str = ""
    """Boot id of the host; empty if unknown."""
    folder: str = ""
    """Device and inode of the state folder's lock, which one agent at a time holds."""
    hostname: str = ""
    since_ns: int = 0
    token: str = ""
    """Different in each write, so that a write whose answer was lost is recognised."""
    why: str = ""


class Takeover(LenientModel):
    """The node was given to this instance by a person.

    The request said how the previous host is known to be off. `over` is the revision of `_instance`
    that was given up. If that key is written again, its holder is back and the takeover is void.
    """

    instance: str
    over: int = 0
    why: str
    time_ns: int


class Approved(LenientModel):
    """Capacity and labels that a node may offer. A report beyond this attracts no VM."""

    labels: dict[str, str] = Field(default_factory=dict)
    cpus: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class HostRecord(LenientModel):
    """`$KV.vm.<node>._host`: the part of a node's join record that a backup keeps.

    Controllers write it by compare-and-set: first the node's first heartbeat, then only a person's
    decision. `trusted`: the host holds the bus admin's credentials anyway, so its report is
    accepted unchanged.
    """

    schema_version: int = SCHEMA_VERSION
    node: str
    host: HostMarks | None = None
    takeover: Takeover | None = None
    approved: Approved | None = None
    trusted: bool = False
    requests: tuple[str, ...] = ()
    """Ids of the last requests about it: a repeated request changes nothing."""


class SigningKey(LenientModel):
    """`$KV.sec._signing.<id>`: an HMAC key in hex, by which controllers sign records."""

    schema_version: int = SCHEMA_VERSION
    seed: str
    created_ns: int = 0
