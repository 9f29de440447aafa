"""Schedules of backups: repeated backups of a VM, with retention (ADR 0068)."""

from enum import StrEnum

from pydantic import Field

from virtbus.schemas.backup import CHAIN_BACKUPS, MAX_CHAIN
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.paging import Paged
from virtbus.schemas.quantity import Count

LEAST_EVERY_S = 300
MOST_EVERY_S = 31 * 86_400
MAX_KEEP = 1000


class BackupScheduleSpec(StrictModel):
    """The VM of a schedule, the times of its backups, and how many are kept."""

    vm: Id
    """The name of the VM. If another VM takes the name later, that VM is backed up."""
    every_s: Count = Field(ge=LEAST_EVERY_S, le=MOST_EVERY_S)
    """The seconds from the beginning of one backup to the beginning of the next backup."""
    keep: Count = Field(ge=1, le=MAX_KEEP)
    """The number of this schedule's backups to keep. Backups that these rest on also stay, and do
    not count."""
    chain: Count = Field(CHAIN_BACKUPS, ge=1, le=MAX_CHAIN)
    """The longest chain, in backups."""
    verify: bool = True
    """If True, each backup is verified after it was made."""
    suspended: bool = False


class BackupScheduleRecord(LenientModel):
    """`$KV.vm._bsched.<namespace>.<token>`: a schedule. The key is also the claim of its name.

    A controller stores `run` before it stores the operation of the run. If the controller dies
    between the two writes, the next holder of the fleet lease begins that run.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Id
    name: Id
    spec: BackupScheduleSpec
    next_ns: int
    """The time at which the next backup is due."""
    run: str = ""
    """The operation in progress, a backup or its verification; empty if there is none."""
    backup: str = ""
    """The backup that `run` verifies; empty while `run` makes it."""
    begun_ns: int = 0
    last_ns: int = 0
    """The time at which the last successful run ended; 0 if no run has succeeded."""
    last_backup: str = ""
    """The last backup that was made, and verified if the schedule says so."""
    failed: str = ""
    """The reason for the failure of the last run; empty after a successful run."""
    missed: int = Field(0, ge=0)
    """The number of runs that did not take place since the last successful run."""
    generation: int = 1
    created_ns: int
    owner: str = ""
    """The owner that the VM had when the schedule was created, as `VmRecord.owner`."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests that changed the schedule. A repeat of such a request changes
    nothing."""

    @property
    def deleting(self) -> bool:
        """Return False: a delete needs no further step."""
        return False


class BackupScheduleState(StrEnum):
    """The state of a schedule that users see."""

    WAITING = "Waiting"
    """The next run is not due."""
    RUNNING = "Running"
    FAILED = "Failed"
    """The last run failed. The next run takes place nevertheless."""
    MISSED = "Missed"
    """A run did not take place at its time."""
    SUSPENDED = "Suspended"


# --- the API ------------------------------------------------------------------------------------
class BackupScheduleCreate(StrictModel):
    """`backup-schedule.create`. The first backup is made at once.

    Without `uid` the server generates one. Send your own UUID to make the request repeatable.
    """

    name: Id
    namespace: Id = "default"
    spec: BackupScheduleSpec
    uid: Uid | None = None


class BackupScheduleAsk(StrictModel):
    """`backup-schedule.get`."""

    name: Id
    namespace: Id = "default"


class BackupScheduleUpdate(BackupScheduleAsk):
    """`backup-schedule.update`: change the given fields. The VM of a schedule cannot change."""

    every_s: Count | None = Field(None, ge=LEAST_EVERY_S, le=MOST_EVERY_S)
    keep: Count | None = Field(None, ge=1, le=MAX_KEEP)
    chain: Count | None = Field(None, ge=1, le=MAX_CHAIN)
    verify: bool | None = None
    suspended: bool | None = None


class BackupScheduleDelete(BackupScheduleAsk):
    """`backup-schedule.delete`: end the schedule. Its backups and a run in progress stay."""


class BackupScheduleList(StrictModel):
    """`backup-schedule.list`. Send the `continue` of a page to request the next page."""

    namespace: Id | None = None
    limit: Count = Field(100, ge=1, le=500)
    continue_: str | None = Field(None, alias="continue", max_length=256)


class BackupScheduleView(LenientModel):
    """A schedule as the API shows it."""

    uid: Uid
    namespace: Id
    name: Id
    spec: BackupScheduleSpec
    state: BackupScheduleState
    message: str = ""
    """The reason for a failure, and the number of missed runs."""
    next_ns: int
    run: str = ""
    last_ns: int = 0
    last_backup: str = ""
    missed: int = 0
    owner: str = ""
    generation: int
    revision: int
    created_ns: int


class BackupSchedulePage(Paged):
    """A page of `backup-schedule.list`, ordered by namespace and name."""

    items: tuple[BackupScheduleView, ...] = ()
