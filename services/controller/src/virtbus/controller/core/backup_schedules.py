"""Decides when the backups of schedules are due, and caches the schedules (ADR 0068)."""

from virtbus.controller.core import named_creates
from virtbus.controller.core.named_creates import CreateStep
from virtbus.controller.core.named_records import NamedRecords
from virtbus.controller.core.vm_keys import StoredBackupSchedule
from virtbus.schemas.backup_schedule import (
    BackupScheduleAsk,
    BackupScheduleCreate,
    BackupScheduleRecord,
    BackupScheduleState,
    BackupScheduleUpdate,
    BackupScheduleView,
)
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.records import read_backup_schedule
from virtbus.schemas.subjects import backup_schedule_record

NAMED_IN_ALARM = 5
MAX_WHY_CHARS = 1000
SECOND_NS = 10**9


class BackupSchedules(NamedRecords[BackupScheduleRecord]):
    """The schedules by key."""

    def __init__(self) -> None:
        super().__init__(
            read_backup_schedule, lambda one: backup_schedule_record(one.namespace, one.name)
        )

    def alarms(self) -> tuple[str, ...]:
        """Return a sentence for each schedule whose last runs failed or were missed.

        From the sixth schedule on, the schedules are only counted. Suspended schedules are left
        out: they make no backups.
        """
        records = [held.record for held in self.listed(None)]
        bad = [one for one in records if why(one) and not one.spec.suspended]
        texts = [
            f"the backup schedule {one.namespace}/{one.name} has no new backup: {why(one)}"
            for one in bad[:NAMED_IN_ALARM]
        ]
        more = len(bad) - len(texts)
        return (*texts, *([f"{more} more backup schedules have none"] if more > 0 else []))


def why(record: BackupScheduleRecord) -> str:
    """Return why the last run failed, and how many runs were missed; empty if neither."""
    missed = f"{record.missed} runs were missed" if record.missed else ""
    return "; ".join(one for one in (record.failed, missed) if one)


def made(want: BackupScheduleCreate, uid: str, owner: str, now_ns: int) -> BackupScheduleRecord:
    """Return the record of a new schedule. Its first backup is due at once."""
    return BackupScheduleRecord(
        uid=uid,
        namespace=want.namespace,
        name=want.name,
        spec=want.spec,
        next_ns=now_ns,
        owner=owner,
        created_ns=now_ns,
    )


def changed(
    record: BackupScheduleRecord, want: BackupScheduleUpdate, now_ns: int
) -> BackupScheduleRecord:
    """Return the schedule after an update. A suspended schedule misses no runs.

    Before the first run, the due time stays. Later the due time moves with the interval, but not
    into the past.
    """
    names = {"every_s", "keep", "chain", "verify", "suspended"}
    fields = want.model_dump(include=names, exclude_none=True)
    spec = record.spec.model_copy(update=fields)
    if spec == record.spec:
        return record
    more: dict[str, object] = {"spec": spec, "generation": record.generation + 1}
    next_ns, every_ns = record.next_ns, spec.every_s * SECOND_NS
    if record.begun_ns:
        next_ns = max(record.begun_ns, next_ns - record.spec.every_s * SECOND_NS) + every_ns
    if next_ns <= now_ns and (record.spec.suspended or spec.every_s != record.spec.every_s):
        next_ns = now_ns + every_ns if record.run else now_ns
    more["next_ns"] = next_ns
    if spec.suspended:
        more["missed"] = 0
    return record.model_copy(update=more)


def due(record: BackupScheduleRecord, now_ns: int) -> bool:
    """Return True if a run has to begin."""
    return not record.run and not record.spec.suspended and record.next_ns <= now_ns


def begun(record: BackupScheduleRecord, run: str, now_ns: int) -> BackupScheduleRecord:
    """Return the schedule with a run that begins now. Due times that passed count as missed."""
    every_ns = record.spec.every_s * SECOND_NS
    passed = max(0, now_ns - record.next_ns) // every_ns
    fields = {
        "run": run,
        "backup": "",
        "begun_ns": now_ns,
        "missed": record.missed + passed,
        "next_ns": record.next_ns + (passed + 1) * every_ns,
    }
    return record.model_copy(update=fields)


def overdue(record: BackupScheduleRecord, now_ns: int) -> BackupScheduleRecord:
    """Return the schedule; runs that were due during the present run count as missed."""
    if not record.run or record.spec.suspended or record.next_ns > now_ns:
        return record
    every_ns = record.spec.every_s * SECOND_NS
    passed = (now_ns - record.next_ns) // every_ns + 1
    fields = {"missed": record.missed + passed, "next_ns": record.next_ns + passed * every_ns}
    return record.model_copy(update=fields)


def verifying(record: BackupScheduleRecord, run: str) -> BackupScheduleRecord:
    """Return the schedule after its backup was made; the operation `run` verifies the backup."""
    return record.model_copy(update={"run": run, "backup": record.run})


def succeeded(record: BackupScheduleRecord, now_ns: int) -> BackupScheduleRecord:
    """Return the schedule after a successful run."""
    fields = {"last_backup": record.backup or record.run, "last_ns": now_ns, "failed": ""}
    return record.model_copy(update={**fields, "missed": 0, "run": "", "backup": ""})


def failed(record: BackupScheduleRecord, message: str) -> BackupScheduleRecord:
    """Return the schedule after a run that failed."""
    fields = {"failed": message[:MAX_WHY_CHARS], "run": "", "backup": ""}
    return record.model_copy(update=fields)


def create_step(
    there: BackupScheduleRecord | None, ended: str, wanted: BackupScheduleRecord
) -> CreateStep:
    """Return the step of a create, as `named_creates.create_step`."""
    same = there is None or there.spec.vm == wanted.spec.vm
    message = f"is of the VM {there.spec.vm}" if there is not None else ""
    differences = () if same else (Detail(path="spec.vm", message=message),)
    return named_creates.create_step(there, ended, wanted, "backup schedule", differences)


def not_found(want: BackupScheduleAsk) -> VirtbusError:
    """Return 404 with the requested name."""
    message = (
        f"there is no backup schedule named {want.name} in namespace {want.namespace}; "
        "`virtbus backup schedule list` shows what there is"
    )
    return VirtbusError(Code.NOT_FOUND, "backup_schedule_not_found", message)


def state_of(record: BackupScheduleRecord) -> BackupScheduleState:
    """Return the state that users see."""
    if record.spec.suspended:
        return BackupScheduleState.SUSPENDED
    if record.run:
        return BackupScheduleState.RUNNING
    if record.failed:
        return BackupScheduleState.FAILED
    return BackupScheduleState.MISSED if record.missed else BackupScheduleState.WAITING


def shown(held: StoredBackupSchedule) -> BackupScheduleView:
    """Return the schedule as the API shows it."""
    fields = held.record.model_dump(include=set(BackupScheduleView.model_fields))
    more = {"state": state_of(held.record), "message": why(held.record), "revision": held.revision}
    return BackupScheduleView.model_validate(fields | more)
