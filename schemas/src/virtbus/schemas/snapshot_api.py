"""Requests and answers of the public API about snapshots, `virtbus.api.v1.snapshot.<verb>`."""

from typing import Literal

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count
from virtbus.schemas.snapshot import SnapshotState


class SnapshotCreate(StrictModel):
    """`snapshot.create`: freeze the disks of a VM, or a volume.

    The disks of a running guest become layers at one instant, without a copy. Those of a VM that is
    off are copied; with `layered`, they become layers as well. Give exactly one of `vm` and
    `volume`. Without `uid` the server generates one. Send your own UUID to make the request
    repeatable. It is also the id of the operation that makes the data.
    """

    name: Id
    namespace: Id = "default"
    vm: Id | None = None
    volume: Id | None = None
    protected: bool = False
    layered: bool = False
    uid: Uid | None = None


class SnapshotAsk(StrictModel):
    """`snapshot.get`. With `uid`, a snapshot of that name with another uid is refused."""

    name: Id
    namespace: Id = "default"
    uid: Uid | None = None


class SnapshotUpdate(SnapshotAsk):
    """`snapshot.update`: change the given fields."""

    protected: bool | None = None


class SnapshotDelete(SnapshotAsk):
    """`snapshot.delete`: remove the snapshot and its data."""


class SnapshotAdopt(SnapshotAsk):
    """`snapshot.adopt`: write the record of a snapshot whose data is on `node` without a record.

    The node says what the snapshot is. `uid` is needed only if it has several of that name.
    """

    node: Id


class SnapshotRestore(SnapshotAsk):
    """`snapshot.restore`: replace the disks of its VM or volume by those of the snapshot.

    The VM must be off. `to` is another VM, or another volume, whose disks of the same names are
    replaced instead; it is on the same node, and keeps its own identity. The disks that are
    replaced become the snapshot `keep`; the default is a name made of this one. `keep_uid` is its
    uid and the id of the operation, as in `snapshot.create`.
    """

    to: Id | None = None

    keep: Id | None = None
    keep_uid: Uid | None = None


class SnapshotList(StrictModel):
    """`snapshot.list`. `vm` or `volume` select those of one VM or volume, by name.

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
    """Also the id of the operation that makes its data."""
    namespace: Id
    name: Id
    owner: str = ""
    resource: Literal["vm", "volume"]
    source: Id
    """The name of its VM or volume."""
    source_uid: Uid
    state: SnapshotState
    message: str = ""
    """The reason for a wait, and the next step; empty if it does not wait."""
    node: str
    protected: bool = False
    replaced_by: str = ""
    """The snapshot whose restore replaced these disks, if it was made by a restore."""
    size_bytes: int = 0
    generation: int
    revision: int
    created_ns: int


class SnapshotPage(Paged):
    """A page of `snapshot.list`, ordered by namespace and name."""

    items: tuple[SnapshotView, ...] = ()
