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

    One write to the record puts the volume on its target. If the move fails before that write, the
    volume stays on its source. Afterwards, the data in the other place is removed.
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
    """The pool that gets the data; None: the target's pool of the same name."""
    former_pool: Id = LOCAL
    """The pool that had the data, if `pool` is another one."""
    kind: PoolKind = PoolKind.LOCAL
    former_kind: PoolKind = PoolKind.LOCAL
    """The kinds of the two pools."""


class VolumeHold(LenientModel):
    """The hold of a shared volume by one VM (ADR 0086)."""

    since_ns: int
    node: str = ""
    """The node of that VM; empty while it has none."""


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

    A volume that several hosts reach has a node only while a VM holds it, and none if it is shared.
    """
    bound: bool = False
    """True since a VM used it: its node may have its data."""
    lost: bool = False
    """True if a person gave up its data together with its node (`node.forget`)."""
    holder: str = ""
    """The uid of the VM that may write to it; empty if there is none. For a shared volume: the
    first of its holders."""
    held_since_ns: int = 0
    """Unix time at which that VM became the holder; 0 if there is none."""
    holds: dict[str, VolumeHold] = Field(default_factory=dict, exclude_if=not_)
    """All holders of a shared volume, by uid; empty for other volumes."""
    made_for: str = ""
    """The uid of the VM whose spec made it; empty if `volume.create` did (ADR 0072)."""
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
    def holders(self) -> tuple[str, ...]:
        """Return the uids of the VMs that may write to it."""
        return tuple(self.holds) or ((self.holder,) if self.holder else ())

    @property
    def abilities(self) -> Abilities:
        """Return what can be done with the volume."""
        return abilities_of(self.spec.pool, self.pool_kind, shared=self.spec.is_shared)

    @property
    def ends_with(self) -> str:
        """Return the uid of the VM whose delete removes the volume, if it then holds the volume."""
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
    """Its data is being copied to another node or pool. No VM can start with it meanwhile."""
    IN_USE = "InUse"
    """A VM holds it."""
    DETACHING = "Detaching"
    """A VM holds it until its guest has released the disk; the request is repeated."""
    LOST = "Lost"
    """Its node was forgotten, with its data."""
    DELETING = "Deleting"
    """Its data is being removed from its node."""
