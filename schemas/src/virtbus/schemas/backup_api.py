"""Requests and answers of the public API about backups, `virtbus.api.v1.backup.<verb>`."""

from typing import Any

from pydantic import Field

from virtbus.schemas.backup import CHAIN_BACKUPS, MAX_CHAIN, BackupDisk, BackupMode
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.quantity import Count

READ_S = 3600
"""The default time limit of a reading, in seconds."""
MAX_READ_S = 86_400


class BackupCreate(StrictModel):
    """`backup.create`: copy all disks of a VM, which may run, to the directory of its node.

    `id` is the id of the backup and of its operation. Without `id` the server generates a
    UUID. Send your own UUID to make the request repeatable.
    """

    vm: Id
    namespace: Id = "default"
    mode: BackupMode = BackupMode.AUTO
    chain: Count = Field(CHAIN_BACKUPS, ge=1, le=MAX_CHAIN)
    """The longest chain, in backups. After a chain of this length, the next backup is full."""
    id: Uid | None = None


class BackupAsk(StrictModel):
    """`backup.get` and `backup.delete`. Without `node`, all nodes with a directory are asked."""

    id: Uid
    node: Id | None = None


class BackupVerify(BackupAsk):
    """`backup.verify`: read a backup and its chain, and compare all digests.

    `operation` is the id of the operation, which makes the request repeatable.
    """

    operation: Uid | None = None


class BackupServe(StrictModel):
    """`backup.serve`: let a reader have all disks of a running VM at one instant, as NBD exports.

    `id` is the id of the reading and of its operation, as in `BackupCreate`. With `since`, the id
    of the last finished reading of the VM, each export has the bitmap `changes`. The bitmap marks
    the clusters that were written since that reading. The operation fails if the reader has not
    finished after `within_s` seconds.
    """

    vm: Id
    namespace: Id = "default"
    since: Uid | None = None
    within_s: Count = Field(READ_S, ge=1, le=MAX_READ_S)
    id: Uid | None = None


class BackupFinish(StrictModel):
    """`backup.finish`: the reader has read all data. The next reading can rest on this one."""

    id: Uid


class BackupList(StrictModel):
    """`backup.list`: the backups in the directories of all nodes, or of one `node`."""

    namespace: Id | None = None
    vm: Id | None = None
    node: Id | None = None


class BackupView(LenientModel):
    """A backup as the API shows it. A list leaves out `spec` and `disks`."""

    id: Uid
    namespace: str = ""
    vm: str = ""
    """The name of the VM."""
    uid: str = ""
    """The uid of the VM."""
    node: str
    """The node whose directory has the backup."""
    created_ns: int = 0
    parent: str = ""
    """The backup that this increment rests on; empty for a full backup."""
    depth: int = 0
    full_because: str = ""
    schedule: str = ""
    """The schedule that made the backup and will remove it; empty if a person made it."""
    remark: str = ""
    size_bytes: int = 0
    verified_ns: int = 0
    """The time of the last verification; 0 if there was none."""
    problem: str = ""
    """The damage that the last verification found, or the reason why the manifest is unreadable."""
    children: tuple[Uid, ...] = ()
    version: str = ""
    spec: dict[str, Any] = Field(default_factory=dict)
    disks: tuple[BackupDisk, ...] = ()


class BackupPage(LenientModel):
    """The answer of `backup.list`, the oldest backup first."""

    items: tuple[BackupView, ...] = ()
    silent: tuple[Id, ...] = ()
    """Nodes that did not answer: their backups are not in the list."""
    truncated: bool = False
    """True if further backups did not fit in the answer. Select by `vm` or `node` to see them."""
