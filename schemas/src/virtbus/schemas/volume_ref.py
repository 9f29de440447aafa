"""References to volumes: by name in a VM's spec, and resolved in its record (ADR 0045)."""

from operator import not_
from typing import Annotated

from pydantic import Field, StringConstraints

from virtbus.schemas.disk import DISK_MAX, DISK_MIN
from virtbus.schemas.filesystem import HostPath
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageRef, ImageTarget
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.pool import LOCAL, Abilities, PoolKind, abilities_of
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.snapshot_ref import SnapshotRef
from virtbus.schemas.volume_spec import VolumeSpec

DevicePath = Annotated[
    str,
    StringConstraints(
        pattern=r"^/dev/[A-Za-z0-9][A-Za-z0-9._:+-]*(/[A-Za-z0-9][A-Za-z0-9._:+-]*)*$"
    ),
    Field(max_length=200),
]
"""A path below /dev without `..`."""
DevicePattern = Annotated[
    str, StringConstraints(pattern=r"^/dev(/(\*|(\*[^/*]|[^/*.])(\*?[^/*])*\*?))+$")
]
"""A pattern of paths in /dev for `Path.glob`. No part is empty, has `**` or begins with a dot."""


class HostDevice(StrictModel):
    """A block device of the node, by its path on the node: a PersistentVolume of a pod.

    Only the container runtime of a node may use a host device. The node's agent opens only devices
    that its setting `devices_allowed` names. Without an `image`, virtbus writes nothing to the
    device.

    With an `image`, imaged writes the image once, and the content outlives the VM. virtbus keeps
    the last MiB of such a device for itself.
    """

    path: DevicePath
    image: ImageRef | None = Field(None, exclude_if=not_)


class HostDisk(StrictModel):
    """A raw disk in a file of the node, below a directory of the setting `directories_allowed`.

    With a `capacity`, the node makes the file if it is missing. The file outlives the VM.
    """

    path: HostPath
    capacity: Bytes | None = Field(None, ge=DISK_MIN, le=DISK_MAX)


class NamedVolume(StrictModel):
    """A volume of the VM's namespace, by name. The VM holds the volume while its spec names it.

    With a `template`, the create of the VM makes a missing volume in the same write as the VM
    (ADR 0072). An existing volume is used as it is.
    """

    name: Id
    template: VolumeSpec | None = Field(None, exclude_if=not_)


class VolumeRef(LenientModel):
    """A volume as the record of its VM describes it, because nodes read only their own keys."""

    uid: Uid
    namespace: Id
    name: Id
    size_bytes: int
    image: str = ""
    """The image of the first content; empty if the volume begins empty or is copied."""
    target: ImageTarget | None = None
    """The meaning of the name `image` at the volume's create, if the bus had that name."""
    copied: bool = False
    """True: an operation makes the disk, and a VM waits for the operation's end."""
    pool: Id = LOCAL
    """The pool of the node that has the data."""
    kind: PoolKind = PoolKind.LOCAL
    """The kind of `pool`."""
    shared: bool = Field(False, exclude_if=not_)
    """True: several VMs may hold the volume at the same time, so its data is raw (ADR 0086)."""

    @property
    def abilities(self) -> Abilities:
        return abilities_of(self.pool, self.kind, shared=self.shared)

    @property
    def key(self) -> str:
        """Return the volume's name in the settings of pools."""
        return f"{self.namespace}.{self.name}"

    @property
    def folder(self) -> str:
        """Return the name of the volume's folder on a host; unique, because ids have no dots."""
        return f"{self.namespace}.{self.name}.{self.uid}"


class FillSource(LenientModel):
    """The source of a copied volume: an image, a disk of a backup, or data on the node.

    Data on the node is another volume, or a disk of a VM or of a snapshot.
    """

    image: str = ""
    target: ImageTarget | None = None
    """The meaning of the name `image` at the volume's create, if the bus had that name."""
    volume: VolumeRef | None = None
    vm: Uid | None = None
    """The VM, with its `epoch` on the node. `disk` names the volume in the VM's spec."""
    epoch: int = 0
    snapshot: SnapshotRef | None = None
    disk: str = ""
    """The disk of the VM, snapshot or backup. Empty: the first disk of the snapshot."""
    backup: str = ""
    """The backup in the node's directory that has the `disk`."""
    moved: bool = False
    """True: the content comes from the volume's former node or pool. It is an error if this node
    still has earlier data of the volume in the new pool."""
