"""Keeps the host's epoch ledger: for each uid, the highest epoch that the host acted on or refused.

The file has lines `<uid> <epoch> <removed_s> .`, which are appended and fsynced. The last line of a
uid counts; incomplete lines are ignored. `refused` in the place of the full stop means that this
host refused the VM under that epoch; a controller may have moved the VM to another node. Each start
of the agent drops the VMs that were removed more than 24 h before the newest removal.

The entries of removed VMs reject records that come back with a restored backup of the bus.
`removed_s` is the bus' time, because the purge markers of the bus expire by that clock. With the
host's time, a clock one day ahead would drop entries too early.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from virtbus.nodeagent.edge.atomic_file import replace
from virtbus.schemas.ids import check_uid

REMOVED_KEPT_S = 86_400
_ENDS = {".": False, "refused": True}


class LedgerEntry(NamedTuple):
    """One uid's entry. `removed_s` is the bus' Unix time of the removal, 0 if not removed."""

    epoch: int
    removed_s: int = 0
    refused: bool = False


class EpochLedger:
    """Call `open` first. The caller must hold a lock, so that only one process uses the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, LedgerEntry] = {}
        self._durable: dict[str, LedgerEntry] = {}
        self._file: int | None = None
        self._now_s = 1

    def open(self) -> None:
        entries = read_entries(self._text())
        self._now_s = max((entry.removed_s for entry in entries.values()), default=0) or 1
        self._entries = _kept(entries, self._now_s)
        lines = (_line(uid, entry) for uid, entry in self._entries.items())
        replace(self._path, "".join(lines).encode())
        self._durable = dict(self._entries)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def seen(self, time_ns: int) -> None:
        """Record a time stamp of the bus. `removed` uses the newest recorded time stamp."""
        self._now_s = max(self._now_s, time_ns // 1_000_000_000)

    def epoch(self, uid: str) -> int:
        """Return the highest epoch that was acted on or refused; 0 if the ledger has none."""
        return self._entries.get(uid, LedgerEntry(0)).epoch

    def all_removed(self) -> dict[str, int]:
        """Return the epoch at which each removed VM left this host, by uid."""
        return {uid: left for uid in self._entries if (left := self.left(uid))}

    def left(self, uid: str) -> int:
        """Return the epoch at which a VM left this host; 0 if the ledger records no removal."""
        entry = self._entries.get(uid, LedgerEntry(0))
        return entry.epoch if entry.removed_s and not entry.refused else 0

    def refused(self, uid: str) -> int:
        """Return the epoch under which this host refused a VM; 0 if the ledger has no refusal."""
        entry = self._entries.get(uid, LedgerEntry(0))
        return entry.epoch if entry.refused else 0

    def acted(self, uid: str, epoch: int) -> None:
        """Record that this host acts on `epoch`; `save` makes it durable."""
        self._entries[uid] = LedgerEntry(max(self.epoch(uid), epoch))

    def removed(self, uid: str, refused_epoch: int = 0) -> None:
        """Record that nothing of the VM is left; `save` makes the entry durable.

        If `refused_epoch` is not 0, this host refused the VM under that epoch.
        """
        epoch = max(self.epoch(uid), refused_epoch)
        self._entries[uid] = LedgerEntry(epoch, self._now_s, refused=bool(refused_epoch))

    def save(self, uid: str) -> None:
        """Write the uid's entry durably. Blocks; may run in any thread.

        Raises:
            OSError: the disk is full or broken. The caller may repeat `save`.
        """
        entry = self._entries.get(uid)
        if entry is None or self._file is None or self._durable.get(uid) == entry:
            return
        # The leading newline ends the line of an earlier failed write.
        line = f"\n{_line(uid, entry)}".encode()
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        os.fdatasync(self._file)
        self._durable[uid] = entry

    def _text(self) -> str:
        try:
            return self._path.read_text(errors="replace")
        except FileNotFoundError:
            return ""


def read_entries(text: str) -> dict[str, LedgerEntry]:
    """Return the entries in the text of a ledger; skip broken lines."""
    entries: dict[str, LedgerEntry] = {}
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) != 4 or fields[3] not in _ENDS or not (fields[1] + fields[2]).isdecimal():
            continue
        try:
            uid, refused = check_uid(fields[0]), _ENDS[fields[3]]
            entries[uid] = LedgerEntry(int(fields[1]), int(fields[2]), refused=refused)
        except ValueError:
            continue
    return entries


def _kept(entries: dict[str, LedgerEntry], now_s: int) -> dict[str, LedgerEntry]:
    return {
        uid: entry
        for uid, entry in entries.items()
        if not entry.removed_s or now_s - entry.removed_s < REMOVED_KEPT_S
    }


def _line(uid: str, entry: LedgerEntry) -> str:
    return f"{uid} {entry.epoch} {entry.removed_s} {'refused' if entry.refused else '.'}\n"
