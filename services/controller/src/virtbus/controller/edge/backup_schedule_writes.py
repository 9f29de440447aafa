"""Writes backup schedules to the bus (ADR 0068)."""

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.backup_schedules import create_step
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas.backup_schedule import BackupScheduleRecord
from virtbus.schemas.records import read_backup_schedule
from virtbus.schemas.subjects import backup_schedule_record


class BackupScheduleWrites(NamedWrites[BackupScheduleRecord]):
    """The controller's writes of backup schedules."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(
            bus, "backup schedule", backup_schedule_record, read_backup_schedule, create_step
        )
