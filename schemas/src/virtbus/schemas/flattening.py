"""Requests to imaged that end the dependence of disks on layers (ADR 0902)."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel
from virtbus.schemas.snapshot import SnapshotDisk


class FlattenWork(LenientModel):
    """`rpc.imaged.flatten`: ensure that disks rest on no layers, as operation `id`, or cancel it.

    No guest may use them. Their content does not change.
    """

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    uid: Uid
    name: Id
    """The name of the VM or the volume."""
    disks: tuple[SnapshotDisk, ...] = Field((), max_length=256)
    may_begin: bool = True
    """False: a guest may use the disks unless this work has begun."""
