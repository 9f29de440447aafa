"""Keeps the host's epoch ledger: the highest epoch that the host acted on or refused, by uid.

It is one file of lines `<uid> <epoch> <removed_s> .`, appended to and fsynced. The last line of a
uid counts; incomplete lines are ignored. `refused` instead of the full stop means that the VM was
refused under that epoch, and a controller may have moved it. Each start rewrites the file without
VMs that were removed more than 24 h before the newest removal.

Removals are stamped with the bus' time, by which its purge markers expire. The host's clock is not
used. If it were a day ahead, entries that reject records of restored backups would be dropped.
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
    """One uid's entry. `removed_s` is the bus' Unix time of the removal, 0 before it."""

    epoch: int
    removed_s: int = 0
    refused: bool = False


class EpochLedger:
    """Call `open` first. The caller's lock ensures that only one process uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, LedgerEntry] = {}
        self._durable: dict[str, LedgerEntry] = {}
        self._file: int | None = None
        self._now_s = 1

    def open(self) -> None:
        """Read the file, drop old entries, and write the rest back."""
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
        """Record a time stamp of the bus, in ns. Removals get the newest one."""
        self._now_s = max(self._now_s, time_ns // 1_000_000_000)

    def epoch(self, uid: str) -> int:
        """Return the highest epoch that was acted on or refused; 0 if the ledger has none."""
        return self._entries.get(uid, LedgerEntry(0)).epoch

    def all_removed(self) -> dict[str, int]:
        """Return the uids in the ledger whose VM left this host, with their epoch."""
        return {uid: left for uid in self._entries if (left := self.left(uid))}

    def left(self, uid: str) -> int:
        """Return the epoch at which a VM left this host; 0 if the ledger does not say that."""
        entry = self._entries.get(uid, LedgerEntry(0))
        return entry.epoch if entry.removed_s and not entry.refused else 0

    def refused(self, uid: str) -> int:
        """Return the epoch under which this host refused a VM; 0 if it did not."""
        entry = self._entries.get(uid, LedgerEntry(0))
        return entry.epoch if entry.refused else 0

    def acted(self, uid: str, epoch: int) -> None:
        """Record that this host acts on `epoch`; `save` makes it durable."""
        self._entries[uid] = LedgerEntry(max(self.epoch(uid), epoch))

    def removed(self, uid: str, refused_epoch: int = 0) -> None:
        """Record that nothing of the VM is left; `save` makes it durable."""
        epoch = max(self.epoch(uid), refused_epoch)
        self._entries[uid] = LedgerEntry(epoch, self._now_s, refused=bool(refused_epoch))

    def save(self, uid: str) -> None:
        """Write the uid's entry durably. Blocks; may run in any thread.

        Raises:
            OSError: the disk is full or broken; `save` can be repeated.
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
    """Return the entries of a ledger; broken lines are skipped."""
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
