"""Observes backups and their schedules: due times, retention, and what an increment rests on."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.sim.backup_hand import Stored
from tests.sim.machine import Host

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.backup_schedules import SECOND_NS, why
from virtbus.schemas.backup import BackupCheck
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.operation import OperationPhase, OperationRecord
from virtbus.schemas.records import read_backup_schedule

if TYPE_CHECKING:
    from tests.sim.observer import Observer

SOON_S = 60.0
"""The time, on the loop's clock, in which a leader handles a due time, and a run makes a step."""


@dataclass
class _OfName:
    """All that schedules of one name have made and kept."""

    made: list[tuple[float, str]] = field(default_factory=list)
    """The times at which complete backups were begun, and their ids."""
    verified: set[str] = field(default_factory=set)
    """Those that were found good once."""
    least_kept: int = 10**9


class BackupObserver:
    """The schedules on the bus, and the backups in the directories."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._records: dict[str, BackupScheduleRecord] = {}
        self._of_name: dict[tuple[str, str], _OfName] = {}
        self._runs: dict[str, float] = {}
        """The operations that schedules have begun, with the time."""
        self._stored: dict[str, Stored] = {}
        self._passed: set[str] = set()
        """The verifications that found nothing wrong."""
        self.delete_asked: set[str] = set()
        """The backups that a user wants to delete."""

    # --- schedules ----------------------------------------------------------------------------
    def wrote(self, entry: Entry) -> None:
        """A schedule was written or purged."""
        if entry.kind is EntryKind.PURGE:
            self._records.pop(entry.key, None)
            return
        record = read_backup_schedule(entry.key, entry.value)
        of_name = self._named(record.namespace, record.name)
        of_name.least_kept = min(of_name.least_kept, record.spec.keep)
        old = self._records.get(entry.key)
        self._records[entry.key] = record
        if old is None:
            self._check(record.run == "" and not why(record), record, "is new, and has a state")
        elif old.uid != record.uid:
            self._check(False, record, "replaces another one without a delete")
        elif old.generation != record.generation:
            self._check(old.run == record.run, record, "has another run after a change by a user")
        else:
            self._times(old, record)
            self._run(old, record)

    def _times(self, old: BackupScheduleRecord, new: BackupScheduleRecord) -> None:
        """Each due time is one run, or is counted as missed, until a success is stored."""
        begins = not old.run and bool(new.run)
        passed, rest = divmod(new.next_ns - old.next_ns, new.spec.every_s * SECOND_NS)
        missed = new.missed - old.missed
        if not why(new) and not new.run:
            self._check(passed == 0, new, "skips a due time at its success")
            return
        self._check(rest == 0 and passed == missed + begins, new, f"passes {passed} due times")
        if begins:
            self._check(new.begun_ns >= old.next_ns, new, "has a run before its time")

    def _run(self, old: BackupScheduleRecord, new: BackupScheduleRecord) -> None:
        """A run is a backup, then its verification; each end is stored as it was."""
        if old.run == new.run:
            return
        end = self._observer.operations.ends.get(old.run)
        if new.run:
            self._check(new.run not in self._runs, new, f"uses the run {new.run} again")
            self._runs[new.run] = self._observer.loop.time()
            good = end is OperationPhase.SUCCEEDED and new.backup == old.run
            self._check(not old.run or good, new, f"leaves its run {old.run}, which is {end}")
        elif new.failed:
            self._check(end is not OperationPhase.SUCCEEDED, new, f"fails after a success: {end}")
        else:
            good = end is OperationPhase.SUCCEEDED
            self._check(good, new, f"succeeds, and its run {old.run} is {end}")
            last = old.backup or old.run
            self._check(new.last_backup == last and not why(new), new, "stores another success")

    def began(self, record: OperationRecord) -> None:
        """A backup by a schedule begins: only as its run."""
        if record.schedule and record.id not in self._runs:
            self._wrong("I2", f"{record.schedule} makes the backup {record.id}, which is no run")

    def has_result(self, record: OperationRecord) -> bool:
        """Return True if a backup was stored, or found good by this verification."""
        if record.kind == "backup":
            return record.id in self._stored
        return record.id in self._passed

    def is_young(self, operation: str) -> bool:
        """Return True for a run of a schedule that has begun a short time ago."""
        begun_s = self._runs.get(operation)
        return begun_s is not None and self._observer.loop.time() - begun_s < SOON_S

    # --- directories --------------------------------------------------------------------------
    def stored(self, host: Host, made: Stored) -> None:
        """A backup is complete: an increment begins where its parent ends."""
        manifest = made.manifest
        self._observer.note(host.name, "backup", manifest.id, manifest.parent, made.since, made.at)
        self._stored[manifest.id] = made
        if manifest.parent:
            parent = host.backups.complete[manifest.parent]
            if parent.manifest.uid != manifest.uid or parent.at != made.since:
                self._wrong("I2", f"{manifest.id} does not fit its parent {manifest.parent}")
        if manifest.schedule:
            made_by = self._named(manifest.namespace, manifest.schedule).made
            insort(made_by, (host.backups.begun_s[manifest.id], manifest.id))

    def checked(self, host: Host, backup: str, check: BackupCheck) -> None:
        """A backup was verified."""
        self._observer.note(host.name, "backup checked", backup, check.problem)
        made = self._stored[backup].manifest
        if not check.problem:
            self._passed.add(check.operation)
        if not check.problem and made.schedule:
            self._named(made.namespace, made.schedule).verified.add(backup)

    def removed(self, host: Host, gone: Stored) -> None:
        """A backup is removed: by a user, or because its schedule does not keep it."""
        made = gone.manifest
        self._observer.note(host.name, "backup removed", made.id)
        if made.id in self.delete_asked:
            return
        of_name = self._named(made.namespace, made.schedule)
        ids = [id_ for _, id_ in of_name.made]
        verified = [one for one in ids if one in of_name.verified]
        if not made.schedule:
            self._wrong("I2", f"{made.id}, which a user made, is removed, and nobody asked")
        elif made.id in ids[-of_name.least_kept :]:
            self._wrong("I2", f"{made.schedule} removes {made.id}, one of its newest")
        elif gone.check is not None and gone.check.problem:
            self._wrong("I2", f"{made.schedule} removes {made.id}, which is damaged")
        elif made.id in verified[-1:]:
            self._wrong("I2", f"{made.schedule} removes {made.id}, the last that was verified")

    def copied(self, host: Host, uid: str) -> None:
        """imaged has copied the disks of a VM that is off."""
        domain = host.domains.get(uid)
        if domain is not None and domain.active:
            self._wrong("I1", f"{host.name} copies the disks of {uid}, whose guest runs")

    # --- settled --------------------------------------------------------------------------
    def at_rest(self) -> Iterator[tuple[str, str]]:
        """Yield schedules that do nothing at their time."""
        pace = self._observer.loop.pace
        late_ns = self._observer.slowest_ns() - int(SOON_S * pace) * SECOND_NS
        for record in self._records.values():
            if not record.spec.suspended and record.next_ns < late_ns:
                yield "I8", f"the schedule {record.name} has passed its time unnoticed"
            if record.run in self._observer.operations.ends and not self.is_young(record.run):
                yield "I8", f"the schedule {record.name} does not see the end of {record.run}"

    def _named(self, namespace: str, schedule: str) -> _OfName:
        return self._of_name.setdefault((namespace, schedule), _OfName())

    def _check(self, holds: bool, record: BackupScheduleRecord, what: str) -> None:
        if not holds:
            self._wrong("I2", f"the schedule {record.name} {what}")

    def _wrong(self, invariant: str, what: str) -> None:
        self._observer.wrong(invariant, what)
