"""Which host a node id belongs to, which of its agents runs, and what it was approved for."""

from pydantic import Field

from virtbus.schemas.model import Fact


class HostMarks(Fact):
    """By what a host is known again: digests, compared and never read.

    `key` is of a random key in the agent's state folder. The others are of what the machine says
    of itself, and empty where it says nothing.
    """

    key: str
    machine: str = ""
    """Of /etc/machine-id."""
    hardware: str = ""
    """Of the firmware's UUID of the machine (DMI)."""

    def same(self, other: "HostMarks") -> bool:
        """True where nothing says that they are of two hosts."""
        own, others = (self.machine, self.hardware), (other.machine, other.hardware)
        differ = any(a and b and a != b for a, b in zip(own, others, strict=True))
        return self.key == other.key and not differ


class Instance(Fact):
    """One life of a node's agent.

    At `$KV.st.<node>._instance` it is the one that acts for the node; each write is a
    compare-and-set over the one before. At `$KV.st.<node>._rival` it is one that was refused,
    with `why`; that key expires.
    """

    schema_version: int = 1
    node: str
    instance: str
    host: HostMarks
    boot: str = ""
    """Of the host's boot; empty where it is not known."""
    folder: str = ""
    """Device and inode of the state folder's lock, which one agent at a time holds."""
    hostname: str = ""
    since_ns: int = 0
    token: str = ""
    """Another in each write: a write whose answer was lost is known again."""
    why: str = ""


class Takeover(Fact):
    """A person gave the node to this instance, and said how the host before is known to be off.

    `over` is the revision of `_instance` that was given up: once that was written again, its
    holder is back and the word is void.
    """

    instance: str
    over: int = 0
    why: str
    time_ns: int


class Approved(Fact):
    """What a node may offer: what it reports beyond this attracts no VM."""

    labels: dict[str, str] = Field(default_factory=dict)
    cpus: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class HostRecord(Fact):
    """`$KV.vm.<node>._host`: the half of a node's join record that a backup keeps.

    Written by controllers by compare-and-set: first what the node's first heartbeat says, then
    only by a person's word. `trusted`: the host holds the admin's credentials of the bus anyway,
    so what it reports counts as it is.
    """

    schema_version: int = 1
    node: str
    host: HostMarks | None = None
    takeover: Takeover | None = None
    approved: Approved | None = None
    trusted: bool = False
    requests: tuple[str, ...] = ()
    """Ids of the last requests about it: one that comes again changes nothing."""


class SigningKey(Fact):
    """`$KV.sec._signing.<id>`: an Ed25519 seed in hex, by which controllers sign records."""

    schema_version: int = 1
    seed: str
    created_ns: int = 0
