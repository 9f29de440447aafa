"""Names the kinds of data on a host and their possible fates, for the table of fates."""

from enum import StrEnum
from typing import NamedTuple


class Data(StrEnum):
    """A kind of data on a host."""

    DISK = "a VM's own disk"
    VOLUME = "a volume"
    OWN_VOLUME = "a volume with retention `Delete`"
    SHARED_VOLUME = "a shared volume"
    QUARANTINE = "a disk in quarantine"
    EXPORT = "an export"
    SNAPSHOT = "a snapshot"
    LAYER = "a layer"
    BACKUP = "a backup"
    DIRECTORY = "a directory or file of the host"


class Fate(StrEnum):
    """The effect of an event on data."""

    STAYS = "stays"
    REMOVED = "removed"
    QUARANTINED = "to the quarantine"
    REFUSED = "refused"
    COPIED = "copied"
    REPLACED = "replaced"
    MOVED = "to the other node or pool"
    LOST = "lost with its host"


class Outcome(NamedTuple):
    """A fate, the test that shows it (`path::name`), and a condition or remark."""

    fate: Fate
    shown_by: str
    note: str = ""
