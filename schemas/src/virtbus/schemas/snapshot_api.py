"""Requests and answers of the public API about snapshots, `virtbus.api.v1.snapshot.<verb>`."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count
from virtbus.schemas.snapshot import SnapshotState


class SnapshotCreate(StrictModel):
    """`snapshot.create`: make a frozen copy of a VM's disks, or of a volume.

    The disks of a running guest become layers at one instant, without a copy. The disks of a VM
    that is off are copied; with `layered`, they become layers, too. Give exactly one of `vm` and
    `volume`. Without `uid` the server generates one. Send your own UUID to make the request
    repeatable. The uid is also the id of the operation that makes the data.
    """

    name: Id
    namespace: Id = "default"
    vm: Id | None = None
    volume: Id | None = None
    protected: bool = False
    layered: bool = False
    uid: Uid | None = None


class SnapshotAsk(StrictModel):
    """`snapshot.get`. The request is refused if the snapshot has another uid than `uid`."""

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None


class SnapshotUpdate(SnapshotAsk):
    """`snapshot.update`: change the given fields."""

    protected: bool | None = None


class SnapshotDelete(SnapshotAsk):
    """`snapshot.delete`: remove the snapshot and its data."""


class SnapshotAdopt(SnapshotAsk):
    """`snapshot.adopt`: write a record for a snapshot that has its data on `node`, but no record.

    A note next to the data describes the snapshot. `uid` is needed only if the node has several
    snapshots of this name.
    """

    node: Id


class SnapshotRestore(SnapshotAsk):
    """`snapshot.restore`: replace the disks of the snapshot's VM or volume by the snapshot's disks.

    The VM must be off. `to` is another VM or volume on the same node, whose disks of the same names
    are replaced instead. `to` keeps its own identity. The disks that are replaced become the
    snapshot `keep`; the default is a name made of the restored snapshot's name. `keep_uid` is the
    uid of `keep`, and the id of the operation, as in `snapshot.create`.
    """

    to: Id | None = None

    keep: Id | None = None
    keep_uid: Uid | None = None


class SnapshotList(StrictModel):
    """`snapshot.list`. `vm` or `volume` select the snapshots of one VM or volume, by name.

    Send the `continue` of a page to request the next page.
    """

    namespace: Id | None = None
    vm: Id | None = None
    volume: Id | None = None
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class SnapshotView(LenientModel):
    """A snapshot as the API shows it."""

    uid: Uid
    """The uid of the snapshot, and the id of the operation that makes its data."""
    namespace: Id
    name: Id
    owner: str = ""
    resource: Literal["vm", "volume"]
    source: Id
    """The name of the VM or the volume."""
    source_uid: Uid
    state: SnapshotState
    message: str = ""
    """The reason for a wait, and the next step; empty if there is no wait."""
    node: str
    protected: bool = False
    replaced_by: str = ""
    """The name of the restored snapshot, if a restore made this snapshot; otherwise empty."""
    size_bytes: int = 0
    generation: int
    revision: int
    created_ns: int


class SnapshotPage(Paged):
    """A page of `snapshot.list`, ordered by namespace and name."""

    items: tuple[SnapshotView, ...] = ()
