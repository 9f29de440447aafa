"""Volumes: named disks that outlive the VMs that use them (ADR 0045)."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageRef, ImageTarget
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.pool import LOCAL, PoolKind
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.vm import DISK_MAX, DISK_MIN
from virtbus.schemas.volume_ref import FillSource


def check_plain_ref(ref: str) -> str:
    """Return a reference without a query; raise ValueError if it has one.

    A query may be a signature, and a volume has no secrets.
    """
    if "?" in ref:
        msg = "must have no query: a volume cannot keep it secret; pull the image, then name it"
        raise ValueError(msg)
    return ref


PlainRef = Annotated[ImageRef, AfterValidator(check_plain_ref)]


class Retention(StrEnum):
    """The rule for a volume when the VM that it was made for is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"
    """Only for volumes made from a VM's template."""


class VolumeSource(StrictModel):
    """The first content of a volume. Without an `image` and a `volume` it is empty.

    The disk is an overlay on the `image`; with `full` it is a copy, which needs no image. A
    `volume` of the same namespace, or the `disk` of a `vm` (default: its first), is always copied.
    So is the `disk` of a `backup`, which is in the directory of the volume's node.
    """

    image: PlainRef | None = None
    full: bool = False
    volume: Id | None = None
    vm: Id | None = None
    disk: Id | None = None
    backup: Uid | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = (self.image, self.volume, self.vm, self.backup)
        if sum(one is not None for one in given) > 1:
            msg = "give one of image, volume, vm and backup"
            raise ValueError(msg)
        if self.full and self.image is None:
            msg = "full needs an image; other sources are always copied"
            raise ValueError(msg)
        if self.disk is not None and self.vm is None and self.backup is None:
            msg = "disk needs a vm or a backup"
            raise ValueError(msg)
        if self.backup is not None and self.disk is None:
            msg = "a backup needs the disk"
            raise ValueError(msg)
        return self

    @property
    def is_copied(self) -> bool:
        """Return True if an operation writes the content, before a VM uses it."""
        copied = (self.volume, self.vm, self.backup)
        return self.full or any(one is not None for one in copied)


class VolumeSpec(StrictModel):
    """The specification of a volume. `size` may grow later, and never shrinks.

    A `size` of 0 means the size of the source. Only a volume with a copied source may have it.
    """

    size: Bytes = Field(le=DISK_MAX)
    source: VolumeSource = VolumeSource()
    pool: Id = LOCAL
    """A pool that the node of the data must have."""
    retention: Retention = Retention.RETAIN
    protected: bool = False
    """True: a delete is refused until this is cleared."""

    @model_validator(mode="after")
    def _has_size(self) -> Self:
        if self.size < DISK_MIN and (self.size or not self.is_copied):
            msg = f"size must be at least {DISK_MIN} bytes; only the size of a copy may be 0"
            raise ValueError(msg)
        return self

    @property
    def is_copied(self) -> bool:
        """Return True if an operation writes the content, before a VM uses it.

        Only a disk in the pool `local` rests on an image: the image store is on the same disk.
        """
        of_image = self.source.image is not None and self.pool != LOCAL
        return of_image or self.source.is_copied


class FillState(StrEnum):
    """The state of the first content of a copied volume."""

    FILLING = "Filling"
    FILLED = "Filled"
    FAILED = "Failed"
    """Nothing was written. The volume can be filled again, or deleted."""


class VolumeFill(LenientModel):
    """The work that writes the first content of a volume (ADR 0053).

    A controller copies the state from the operation, which is removed after a day.
    """

    operation: str = ""
    """The id of the last operation; empty if it is unknown."""
    state: FillState = FillState.FILLING
    message: str = ""
    """The cause of a failure."""
    source: FillSource = FillSource()


class VolumeMove(LenientModel):
    """The move of a volume's data from node to node, or to another pool (ADR 0063).

    The volume is on its target once its record says so, in one write. Before it, a failure leaves
    it where it was. The data that is left in the other place is removed afterwards.
    """

    source: Id
    target: Id
    export: Uid
    """The operation on the source that writes the data to a file."""
    fill: Uid
    """The operation on the target that makes the disk of that file."""
    failed: str = ""
    """The reason of a failure; empty for none. The volume stays on its source."""
    cleaned: bool = False
    """True: nothing is left of a move that has failed."""
    pool: Id | None = None
    """The pool that gets the data; None: that of the same name."""
    former_pool: Id = LOCAL
    """The pool that had the data, if `pool` is another one. Both are of the kind local."""


class VolumeRecord(LenientModel):
    """`$KV.vm._vol.<namespace>.<token>`: a volume. The key is also the claim of its name.

    A delete leaves a purge marker with the uid for a day. So a late create of that uid is refused.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Id
    name: Id
    labels: dict[str, str] = Field(default_factory=dict)
    spec: VolumeSpec
    pool_kind: PoolKind = PoolKind.LOCAL
    """The kind of its pool, as the nodes reported it at its create."""
    node: str = ""
    """The node of its data; empty until a VM uses it, unless its creator chose the node.

    A volume that several hosts reach has a node only while a VM holds it.
    """
    bound: bool = False
    """True since a VM used it: its node may have its data."""
    lost: bool = False
    """True if a person gave up its data together with its node (`node.forget`)."""
    holder: str = ""
    """The uid of the VM that may write to it; empty if there is none."""
    held_since_ns: int = 0
    """Unix time at which that VM became the holder; 0 if there is none."""
    target: ImageTarget | None = None
    """The meaning of its image's name at its create, if the bus had that name."""
    fill: VolumeFill | None = None
    """The state of its first content; None if a VM makes the disk."""
    move: VolumeMove | None = None
    """The move of its data that has not ended, or the last one that failed."""
    deleting: bool = False
    generation: int = 1
    """Rises with every change of the spec."""
    created_ns: int
    owner: str = ""
    """The bridge that created it, or empty, as `VmRecord.owner`."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed it. A repeat changes nothing."""

    @property
    def is_moving(self) -> bool:
        """Return True while the data is being copied: the volume is still on the source."""
        move = self.move
        if move is None or move.failed or self.node != move.source:
            return False
        return move.pool is None or self.spec.pool == move.former_pool

    @property
    def has_open_move(self) -> bool:
        """Return True while there is something to do for a move, also to clean up after it."""
        move = self.move
        return move is not None and not self.lost and not (move.failed and move.cleaned)


class VolumeState(StrEnum):
    """The state of a volume that users see."""

    AVAILABLE = "Available"
    """No VM has used it, so it has no data yet."""
    BOUND = "Bound"
    """A VM has used it: its node may have its data. No VM holds it."""
    FILLING = "Filling"
    """Its content is being copied. A VM with this volume waits."""
    FILL_FAILED = "FillFailed"
    """Its content could not be copied. `volume.fill` repeats the copy."""
    MOVING = "Moving"
    """Its data is being copied to another node. No VM can take it meanwhile."""
    IN_USE = "InUse"
    """A VM holds it."""
    DETACHING = "Detaching"
    """A VM holds it until its guest has released the disk; the request is repeated."""
    LOST = "Lost"
    """Its node was forgotten, with its data."""
    DELETING = "Deleting"
    """Its data is being removed from its node."""
