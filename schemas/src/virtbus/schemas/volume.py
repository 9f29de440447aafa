"""Volumes: named disks that outlive the VMs that use them (ADR 0045)."""

from enum import StrEnum
from operator import not_

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.pool import LOCAL, Abilities, PoolKind, abilities_of
from virtbus.schemas.volume_ref import FillSource
from virtbus.schemas.volume_spec import Retention as Retention
from virtbus.schemas.volume_spec import VolumeSource as VolumeSource
from virtbus.schemas.volume_spec import VolumeSpec as VolumeSpec


class FillState(StrEnum):
    """The state of the first content of a copied volume."""

    FILLING = "Filling"
    FILLED = "Filled"
    FAILED = "Failed"
    """The content could not be written. The volume can be filled again, or deleted."""


class VolumeFill(LenientModel):
    """The work that writes the first content of a volume (ADR 0053).

    A controller copies the state from the operation, which is removed after a day.
    """

    operation: str = ""
    """The id of the last operation; empty if unknown."""
    state: FillState = FillState.FILLING
    message: str = ""
    """The cause of a failure."""
    source: FillSource = FillSource.model_construct()


class VolumeMove(LenientModel):
    """The move of a volume's data from node to node, or to another pool (ADR 0063).

    One write to the record puts the volume on its target. If the move fails before that write, the
    volume stays on its source. After success, the former data is removed. After a failure, the new
    data is removed.
    """

    source: Id
    target: Id
    export: Uid
    """The operation on the source that writes the data to a file."""
    fill: Uid
    """The operation on the target that makes the disk from that file."""
    failed: str = ""
    """The reason of a failure, after which the volume stays on its source; otherwise empty."""
    cleaned: bool = False
    """True: nothing is left of a move that has failed."""
    pool: Id | None = None
    """The pool that gets the data; None: the target's pool of the same name."""
    former_pool: Id = LOCAL
    """The pool that had the data, if `pool` is another pool."""
    kind: PoolKind = PoolKind.LOCAL
    former_kind: PoolKind = PoolKind.LOCAL
    """The kind of the former pool; `kind` is that of the new pool."""


class VolumeHold(LenientModel):
    """The hold of a shared volume by one VM (ADR 0086)."""

    since_ns: int
    node: str = ""
    """The node of the VM; empty while the VM has none."""


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
    """The kind of the volume's pool, as the nodes reported it at the volume's create."""
    node: str = ""
    """The node of the data; empty until a VM uses the volume, if its creator chose no node.

    A volume that several hosts reach has a node only while a VM holds the volume. With
    the access `shared`, such a volume has no node.
    """
    bound: bool = False
    """True if a VM or a copy may have written to the volume: the node may have its data."""
    lost: bool = False
    """True if a person gave up the data together with the node (`node.forget`)."""
    holder: str = ""
    """The uid of the VM that may write to the volume; empty if there is none. For a shared volume:
    the first of its holders."""
    held_since_ns: int = 0
    """Unix time at which the VM `holder` became the holder; 0 if there is none."""
    holds: dict[str, VolumeHold] = Field(default_factory=dict, exclude_if=not_)
    """All holders of a shared volume, by uid; empty for other volumes."""
    made_for: str = ""
    """The uid of the VM whose spec made the volume; empty if `volume.create` did (ADR 0072)."""
    target: ImageTarget | None = None
    """The meaning of the image's name at the volume's create, if the bus had the name."""
    fill: VolumeFill | None = None
    """The state of the first content; None if the disk is made for the first VM."""
    move: VolumeMove | None = None
    """The move of the data that has not ended, or the last move that failed."""
    deleting: bool = False
    generation: int = 1
    """Rises with every change of the spec."""
    created_ns: int
    owner: str = ""
    """The bridge that created the volume, or empty, as `VmRecord.owner`."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the record. A repeat of such a request changes
    nothing."""

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self.holds) or ((self.holder,) if self.holder else ())

    @property
    def abilities(self) -> Abilities:
        return abilities_of(self.spec.pool, self.pool_kind, shared=self.spec.is_shared)

    @property
    def ends_with(self) -> str:
        """Return the uid of the VM whose delete removes the volume, if the VM holds it then.

        Empty if no VM's delete removes the volume.
        """
        kept = self.spec.retention is Retention.RETAIN or self.spec.protected
        return "" if kept else self.made_for

    @property
    def is_moving(self) -> bool:
        """Return True while the data is being copied: the volume is still on the source."""
        move = self.move
        if move is None or move.failed or self.node != move.source:
            return False
        return move.pool is None or self.spec.pool == move.former_pool

    @property
    def has_open_move(self) -> bool:
        """Return True while a move, or the cleanup after the move, is not done."""
        move = self.move
        return move is not None and not self.lost and not (move.failed and move.cleaned)


class VolumeState(StrEnum):
    """The state of a volume that users see."""

    AVAILABLE = "Available"
    """No VM has used the volume, so it has no data yet."""
    BOUND = "Bound"
    """A VM or a copy may have written to the volume. No VM holds the volume."""
    FILLING = "Filling"
    """The volume's content is being copied. A VM with this volume waits."""
    FILL_FAILED = "FillFailed"
    """The volume's content could not be copied. `volume.fill` repeats the copy."""
    MOVING = "Moving"
    """The data is being copied to another node or pool. No VM can start with the volume."""
    IN_USE = "InUse"
    """A VM holds the volume."""
    DETACHING = "Detaching"
    """A VM holds the volume until its guest has released the disk. The agent repeats the request
    to the guest."""
    LOST = "Lost"
    """The volume's node was forgotten, with the data."""
    DELETING = "Deleting"
    """The volume's data is being removed from the node."""
