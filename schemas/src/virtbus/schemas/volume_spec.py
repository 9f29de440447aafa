"""The specification of a volume: its size, first content, pool, access and retention (ADR 0045)."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from virtbus.schemas.disk import DISK_MAX, DISK_MIN
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageRef
from virtbus.schemas.model import StrictModel
from virtbus.schemas.pool import LOCAL
from virtbus.schemas.quantity import Bytes


def check_plain_ref(ref: str) -> str:
    """Return a reference without a query; raise ValueError for a query.

    A query may be a signature, which is a secret, and a volume cannot keep a secret.
    """
    if "?" in ref:
        msg = "must have no query: a volume cannot keep it secret; pull the image, then name it"
        raise ValueError(msg)
    return ref


PlainRef = Annotated[ImageRef, AfterValidator(check_plain_ref)]


class Retention(StrEnum):
    """The fate of a volume if the VM whose spec made it is deleted, and holds it at that time."""

    RETAIN = "Retain"
    DELETE = "Delete"
    """The volume is deleted if it is not protected. Only for volumes that a VM's spec makes."""


class Access(StrEnum):
    """The VMs that may hold a volume at a time (ADR 0086)."""

    ONE = "one"
    SHARED = "shared"
    """Up to `SHARED_MAX` VMs, whose guests have a cluster file system. The data is raw."""


SHARED_MAX = 16
"""Limit of VMs that hold a shared volume."""


class VolumeSource(StrictModel):
    """The first content of a volume. Without a source, the volume begins empty.

    The disk is an overlay on the `image`. With `full`, the disk is a copy that does not need the
    image later. Other sources are always copied: a `volume` of the same namespace, or the `disk` of
    a `vm` or a `snapshot` (default: the first disk), or the `disk` of a `backup` in a directory of
    the node.
    """

    image: PlainRef | None = None
    full: bool = False
    volume: Id | None = None
    vm: Id | None = None
    snapshot: Id | None = None
    disk: Id | None = None
    backup: Uid | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = (self.image, self.volume, self.vm, self.snapshot, self.backup)
        if sum(one is not None for one in given) > 1:
            msg = "give one of image, volume, vm, snapshot and backup"
            raise ValueError(msg)
        if self.full and self.image is None:
            msg = "full needs an image; other sources are always copied"
            raise ValueError(msg)
        of_disks = (self.vm, self.snapshot, self.backup)
        if self.disk is not None and all(one is None for one in of_disks):
            msg = "disk needs a vm, a snapshot or a backup"
            raise ValueError(msg)
        if self.backup is not None and self.disk is None:
            msg = "a backup needs the disk"
            raise ValueError(msg)
        return self

    @property
    def is_copied(self) -> bool:
        """Return True if an operation writes the content, before a VM uses it."""
        others = (self.volume, self.vm, self.snapshot, self.backup)
        return self.full or any(one is not None for one in others)


class VolumeSpec(StrictModel):
    """The specification of a volume. `size` may grow later, and never shrinks.

    A `size` of 0 means the size of the source, and is allowed only if the source is copied.
    """

    size: Bytes = Field(le=DISK_MAX)
    source: VolumeSource = VolumeSource.model_construct()
    pool: Id = LOCAL
    """A pool that the node of the data must have."""
    retention: Retention = Retention.RETAIN
    protected: bool = False
    """If True, a delete is refused until an update clears this field."""
    access: Access = Field(Access.ONE, exclude_if=lambda access: access is Access.ONE)
    """The access of a volume never changes."""

    @property
    def is_shared(self) -> bool:
        return self.access is Access.SHARED

    @model_validator(mode="after")
    def _is_shareable(self) -> Self:
        if self.is_shared and self.source != VolumeSource():
            msg = "access: a shared volume begins empty; leave the source out"
            raise ValueError(msg)
        if self.is_shared and self.retention is Retention.DELETE:
            msg = "access: a shared volume has no VM that it ends with; leave the retention out"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _has_size(self) -> Self:
        if self.size < DISK_MIN and (self.size or not self.is_copied):
            msg = f"size must be at least {DISK_MIN} bytes; only the size of a copy may be 0"
            raise ValueError(msg)
        return self

    @property
    def is_copied(self) -> bool:
        """Return True if an operation writes the content, before a VM uses it.

        Only a volume in the pool `local` can rest on an image, because the image store is there.
        """
        of_image = self.source.image is not None and self.pool != LOCAL
        return of_image or self.source.is_copied
