"""Requests and answers of the public API about volumes, `virtbus.api.v1.volume.<verb>`."""

from pydantic import Field

from virtbus.schemas.disk import DiskBus
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Bytes, Count
from virtbus.schemas.vm import DISK_MAX, DISK_MIN, Labels
from virtbus.schemas.volume import Retention, VolumeSpec, VolumeState


class VolumeCreate(StrictModel):
    """`volume.create`.

    Without `uid` the server generates one. Send your own UUID to make the request repeatable.
    `node` chooses the node of the data. The default is the node of the first VM that uses the
    volume. For a full copy of an image, the default is a node that the controller chooses. A disk
    of a backup needs `node`. Any other copy is on the node of its source.
    """

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None
    labels: Labels = Field(default_factory=dict)
    spec: VolumeSpec
    node: Id | None = None


class VolumeAsk(StrictModel):
    """`volume.get`. The request is refused if the volume has another uid than `uid`."""

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None


class VolumeUpdate(VolumeAsk):
    """`volume.update`: changes the given fields. `size` may only grow; `labels` replace all labels.

    A volume also grows under a running guest, if the disk's bus can report the size to the guest.
    """

    size: Bytes | None = Field(None, ge=DISK_MIN, le=DISK_MAX)
    protected: bool | None = None
    retention: Retention | None = None
    """Only a volume that a VM's spec made can have Delete."""
    labels: Labels | None = None


class VolumeDelete(VolumeAsk):
    """`volume.delete`: removes the volume and its data. No VM may hold the volume."""


class VolumeFillAgain(VolumeAsk):
    """`volume.fill`: copies the content again, after a failure or a cancel."""


class VolumeMoveTo(VolumeAsk):
    """`volume.move`: moves the data to `node`, or to `pool`, or both.

    A VM that holds the volume must be off. If the node changes, the VM moves with all of its
    volumes, or nothing moves. A request with the present node and pool of the data cancels a move
    that has not ended.
    """

    node: Id | None = None
    """Default: the node of the data."""
    pool: Id | None = None
    """Default: the pool of the volume."""


class VolumeAdopt(VolumeAsk):
    """`volume.adopt`: writes a record for a volume that has its data on `node`, but no record.

    A note with the data describes the volume. `uid` is needed only if the node has several
    volumes of this name.
    """

    node: Id


class VolumeAttach(VolumeAsk):
    """`volume.attach`: adds the volume to a VM of its namespace, as a further disk.

    After the attach, the VM holds the volume. A running guest gets the disk at once, if the disk's
    bus has hot-plug. `disk` is the name of the disk; the default is the volume's name.
    """

    vm: Id
    disk: Id | None = None
    bus: DiskBus = DiskBus.VIRTIO


class VolumeDetach(VolumeAsk):
    """`volume.detach`: removes the volume and its disk from the VM that holds it.

    While a running guest has not released the disk, the volume is Detaching. A shared volume with
    several holders needs `vm`, the holder that gives the volume up. If this VM does not hold the
    volume, nothing changes. For a volume that is not shared, the request is refused if `vm` is not
    the holder. `gone` is the uid of a holder without a record; a person confirms that this holder
    has no guest. Without `force`, the request is refused if the guest agent says that the disk is
    mounted.
    """

    vm: Id | None = None
    gone: Uid | None = None
    force: bool = False


class VolumeList(StrictModel):
    """`volume.list`. Send the `continue` of a page to request the next page."""

    namespace: Id | None = None
    labels: Labels = Field(default_factory=dict)
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class VolumeHolder(LenientModel):
    """A VM that holds a volume."""

    uid: Uid
    name: str = ""
    since_ns: int = 0
    node: str = ""
    detaching: bool = False
    """True: the VM holds the volume only until its guest has released the disk."""


class VolumeView(LenientModel):
    """A volume as the API shows it."""

    uid: Uid
    namespace: Id
    name: Id
    owner: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    spec: VolumeSpec
    state: VolumeState
    message: str = ""
    """The reason for a wait, and the next step; empty if there is no wait."""
    node: str = ""
    """The node of the data; empty until a VM uses the volume, if its creator chose no node."""
    holder: str = ""
    """The uid of the VM that may write to the volume; the first of `holders` of a shared volume."""
    holder_name: str = ""
    held_since_ns: int = 0
    """Unix time at which the VM `holder` became the holder; 0 if there is none."""
    holders: tuple[VolumeHolder, ...] = ()
    """All VMs that hold the volume; more than one only if the volume's access is `shared`."""
    made_for: str = ""
    """The uid of the VM whose spec made the volume; empty if `volume.create` did."""
    fill_operation: str = ""
    """The operation that copies the content; empty if there is none, or if it succeeded."""
    moving_to: str = ""
    """The node to which the data is being moved."""
    deleting: bool = False
    generation: int
    revision: int
    created_ns: int


class VolumeCreated(LenientModel):
    """The answer of `volume.create`. `created` is False if the same volume existed before."""

    volume: VolumeView
    created: bool = False


class VolumePage(Paged):
    """A page of `volume.list`, ordered by namespace and name."""

    items: tuple[VolumeView, ...] = ()
