"""Pools: the places on a node that hold the data of volumes (ADR 0060)."""

from enum import StrEnum
from typing import NamedTuple

from pydantic import Field

from virtbus.schemas.ids import Id
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel

LOCAL = "local"
"""The pool that each node has without a setting, in the folder of the node's disks."""
POOLS_MAX = 16
"""The most pools of one node. Their reports share one message."""
MESSAGE_MAX = 300
END_BYTES = 1024**2
"""The bytes at the end of a device in which virtbus notes the device's volume. Guests do not see
them."""
ASSIGNED_MAX = 64
"""The most volumes that are assigned in the pools of one node. Their names share one message."""


class PoolKind(StrEnum):
    """The place where a pool keeps its data."""

    LOCAL = "local"
    """A directory of the host; each volume is a file."""
    BLOCK = "block"
    """Devices of the host; each is assigned to one volume."""
    LVM = "lvm"
    """A volume group of the host; each volume is a logical volume that virtbus makes."""
    NBD = "nbd"
    """A server of network block devices; each volume is an export that its operator made."""
    ISCSI = "iscsi"
    """An iSCSI portal; each volume is a logical unit (LUN) of a target."""
    RBD = "rbd"
    """A Ceph cluster; each volume is an image."""
    NFS = "nfs"
    """An NFS server; each volume is a raw file."""


ON_DEVICES = frozenset({PoolKind.BLOCK, PoolKind.LVM})
"""Kinds whose volumes are block devices of the host. The agent opens the devices, and an operation
writes their first content."""


class Abilities(NamedTuple):
    """The properties of a kind of pool that its users can rely on."""

    shared: bool
    """Several hosts reach the same data."""
    snapshots: bool
    """Snapshots of running guests, by layers, and restores in place."""
    copied_snapshots: bool
    """Snapshots of VMs that are off, as copies. A new volume from such a snapshot restores it."""
    backups: bool
    clones: bool
    """A volume that begins with an image is ready at once. If False, such a volume is a full
    copy."""
    grow: bool
    discard: bool
    """A discard in the guest frees space of the pool."""
    copies: bool
    """virtbus writes the first content: nothing, an image, or a copy."""
    exports: bool
    """virtbus can read the data of volumes that no guest uses, to export or copy the volumes."""
    assigned: bool
    """The pool's operator makes the device, export, LUN, image or file of each volume, and assigns
    it by the volume's name."""


_ON_SERVER = Abilities(
    shared=True,
    snapshots=False,
    copied_snapshots=False,
    backups=False,
    clones=False,
    grow=False,
    discard=True,
    copies=False,
    exports=False,
    assigned=True,
)
ABILITIES = {
    PoolKind.LOCAL: Abilities(
        shared=False,
        snapshots=False,
        copied_snapshots=True,
        backups=True,
        clones=False,
        grow=True,
        discard=True,
        copies=True,
        exports=True,
        assigned=False,
    ),
    PoolKind.BLOCK: Abilities(
        shared=False,
        snapshots=False,
        copied_snapshots=False,
        backups=False,
        clones=False,
        grow=False,
        discard=True,
        copies=True,
        exports=True,
        assigned=True,
    ),
    PoolKind.LVM: Abilities(
        shared=False,
        snapshots=False,
        copied_snapshots=False,
        backups=False,
        clones=False,
        grow=True,
        discard=True,
        copies=True,
        exports=True,
        assigned=False,
    ),
    PoolKind.NBD: _ON_SERVER,
    PoolKind.ISCSI: _ON_SERVER,
    PoolKind.RBD: _ON_SERVER,
    PoolKind.NFS: _ON_SERVER._replace(discard=False),  # QEMU's NFS driver has no discard
}
BUILT_IN = ABILITIES[PoolKind.LOCAL]._replace(snapshots=True, clones=True)
"""The abilities of the pool `local`: its volumes are on the disk of images and snapshots."""
_NOT_SHARED = dict.fromkeys(
    ("snapshots", "copied_snapshots", "backups", "clones", "grow", "exports"), False
)
"""The abilities that a shared volume lacks, because each of these abilities needs one QEMU that
knows all writes to the volume (ADR 0086)."""


def abilities_of(name: str, kind: PoolKind, *, shared: bool = False) -> Abilities:
    """Return the abilities of a pool; with `shared`, the abilities of a shared volume in it."""
    able = BUILT_IN if name == LOCAL else ABILITIES[kind]
    return able._replace(**_NOT_SHARED) if shared else able


class PoolState(StrEnum):
    """The state of a pool on one node."""

    READY = "Ready"
    FULL = "Full"
    """The pool has reached its reserve or overcommit limit. It takes no new data; deletes work."""
    READ_ONLY = "ReadOnly"
    """The pool's file system refuses writes."""
    SLOW = "Slow"
    """The pool did not answer the last test in time."""
    GONE = "Gone"
    """The pool is not mounted, or does not answer."""


TAKES_DATA = frozenset({PoolState.READY, PoolState.SLOW})
"""States in which a pool takes new data. For other states, the report's `message` is the reason."""
USABLE = TAKES_DATA | {PoolState.FULL}
"""States in which a VM with data in the pool may start."""


class PoolReport(LenientModel):
    """A pool as its node sees it. Sizes are rounded, so that small changes cost no message."""

    name: Id
    kind: PoolKind
    state: PoolState
    message: str = Field("", max_length=MESSAGE_MAX)
    """The reason of the state, and the next step; empty if the state is Ready."""
    size_bytes: int = 0
    free_bytes: int = 0
    reserve_bytes: int = 0
    """The bytes that new data must leave free."""
    allocated_bytes: int = 0
    """The sum of the volumes' sizes, as guests see them."""
    overcommit: float = 0.0
    """The limit of `allocated_bytes`, as a multiple of `size_bytes`; 0: no limit."""
    volumes: int = 0
    block_bytes: int = 0
    """The unit of writes on the pool's storage."""
    assigned: tuple[str, ...] = Field((), max_length=ASSIGNED_MAX)
    """The volumes, as `namespace.name`, to which the pool's operator has assigned a place."""
    place_bytes: dict[str, int] = Field(default_factory=dict, max_length=ASSIGNED_MAX)
    """The size of each volume's place (a device, export, LUN, image or file), if the node knows
    the size."""
    places_confirmed_ns: int = 0
    """The time at which the server confirmed the oldest outdated size in `place_bytes`; 0 if no
    size is outdated."""

    @property
    def abilities(self) -> Abilities:
        return abilities_of(self.name, self.kind)

    def refusal(self, more_bytes: int) -> str:
        """Return why the pool refuses `more_bytes` of new data; empty if the pool takes them."""
        if self.state not in TAKES_DATA:
            return f"is {self.state}: {self.message}"
        limit_bytes = self.size_bytes * self.overcommit
        if limit_bytes and self.allocated_bytes + more_bytes > limit_bytes:
            return (
                f"has promised {self.allocated_bytes} bytes, and may promise "
                f"{int(limit_bytes)} (overcommit); {more_bytes} more do not fit"
            )
        return ""


class NodePools(LenientModel):
    """`$KV.st.<node>._pools`: the pools of a node, for placement. Written on change."""

    schema_version: int = SCHEMA_VERSION
    node: str
    pools: tuple[PoolReport, ...] = Field((), max_length=POOLS_MAX)
