"""The host's epoch ledger: the highest epoch that this host ever acted on, by uid.

One file of lines `<uid> <epoch> <removed_s> .`, appended to and fsynced; the last line of a uid
holds, a line that is not whole counts for nothing. `refused` instead of the full stop: the VM was
never taken under that epoch, and whoever was told so may have moved it. It is written anew at
each start, without the entries whose VM was removed more than 24 h before the newest removal.

Removals are stamped with the bus's time, by which its purge markers expire. The host's own clock
has no say: one that is a day ahead would forget every fence against restored backups.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from virtbus.nodeagent.edge.durable import replace
from virtbus.schemas.ids import check_uid

REMOVED_KEPT_S = 86_400
_ENDS = {".": False, "refused": True}


class Entry(NamedTuple):
    """`removed_s` is the bus's Unix time, 0 while the VM is there."""

    epoch: int
    removed_s: int = 0
    refused: bool = False


class EpochLedger:
    """`open` first; one process at a time, which the caller's lock ensures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Entry] = {}
        self._durable: dict[str, Entry] = {}
        self._file: int | None = None
        self._now_s = 1

    def open(self) -> None:
        """Read, drop what is too old, write the rest anew."""
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
        """The bus stored something at this time of its own."""
        self._now_s = max(self._now_s, time_ns // 1_000_000_000)

    def epoch(self, uid: str) -> int:
        """The highest epoch ever acted on; 0 for an unknown uid."""
        return self._entries.get(uid, Entry(0)).epoch

    def all_removed(self) -> dict[str, int]:
        """The uids whose VM left this host, with the epoch that it had."""
        return {uid: left for uid in self._entries if (left := self.left(uid))}

    def left(self, uid: str) -> int:
        """The epoch at which a VM left this host; 0 for one that is here, or was never."""
        entry = self._entries.get(uid, Entry(0))
        return entry.epoch if entry.removed_s and not entry.refused else 0

    def refused(self, uid: str) -> int:
        """The epoch under which this host did not take a VM; 0 for any other."""
        entry = self._entries.get(uid, Entry(0))
        return entry.epoch if entry.refused else 0

    def acted(self, uid: str, epoch: int) -> None:
        """This host acts on `epoch`; `save` makes it durable."""
        self._entries[uid] = Entry(max(self.epoch(uid), epoch))

    def removed(self, uid: str, refused_epoch: int = 0) -> None:
        """Nothing of the VM is left; `save` makes it durable."""
        epoch = max(self.epoch(uid), refused_epoch)
        self._entries[uid] = Entry(epoch, self._now_s, refused=bool(refused_epoch))

    def save(self, uid: str) -> None:
        """Durable on return. Blocks; may run in any thread.

        Raises:
            OSError: the disk is full or broken; `save` again tries again.
        """
        entry = self._entries.get(uid)
        if entry is None or self._file is None or self._durable.get(uid) == entry:
            return
        # The leading newline ends a line that an earlier write could not.
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


def read_entries(text: str) -> dict[str, Entry]:
    """The entries of a ledger, broken lines left out."""
    entries: dict[str, Entry] = {}
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) != 4 or fields[3] not in _ENDS or not (fields[1] + fields[2]).isdecimal():
            continue
        try:
            uid, refused = check_uid(fields[0]), _ENDS[fields[3]]
            entries[uid] = Entry(int(fields[1]), int(fields[2]), refused=refused)
        except ValueError:
            continue
    return entries


def _kept(entries: dict[str, Entry], now_s: int) -> dict[str, Entry]:
    return {
        uid: entry
        for uid, entry in entries.items()
        if not entry.removed_s or now_s - entry.removed_s < REMOVED_KEPT_S
    }


def _line(uid: str, entry: Entry) -> str:
    return f"{uid} {entry.epoch} {entry.removed_s} {'refused' if entry.refused else '.'}\n"
