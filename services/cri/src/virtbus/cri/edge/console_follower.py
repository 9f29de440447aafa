"""Copies a VM's console into the log file of its container, in CRI's format.

The agent of this node writes the console to a local file, so logs need no bus. The position in this
file is stored after the lines are written. So a kill of virtbus-cri may repeat lines, and loses no
line. To rotate a log, kubelet renames the log file and calls ReopenContainerLog.
"""

import asyncio
import json
import logging
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from virtbus.bus.runtime.sources import Sources
from virtbus.cri.core.log_lines import LogLines

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Maximum bytes of one copy, so that a guest with much output delays no other log."""
LOOK_S = 0.2
QUIET_S = 1.0
"""Duration of a guest's silence after which an unfinished line is written as a part."""
WARN_S = 60.0
"""Minimum time between two warnings about one log."""


class Position(NamedTuple):
    """A position in the console: the inode of the file, and the number of bytes before it."""

    inode: int = 0
    offset: int = 0


class ConsoleFollower:
    """Copies the console to the log of one container. `place` is the file with the position.

    A step copies a limited piece between local files. So the steps need no thread.
    """

    def __init__(self, console: Path, log_path: Path, place: Path, sources: Sources) -> None:
        self._console = console
        self._log_path = log_path
        self._place = place
        self._sources = sources
        self._lines = LogLines()
        self._unwritten = b""
        """Log lines that could not be written yet, for example because the disk was full."""
        self._warned_s = -WARN_S
        self._from = -1
        self._to = -1
        self._at = Position()
        self._fed_s = 0.0

    def begin(self, *, fresh: bool) -> None:
        """Open the log, and find the position in the console at which the copy begins.

        The copy continues at the stored position. Without a stored position, a `fresh` attempt
        begins at the console's end. Any other attempt begins at the console's start.
        """
        self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError, ValueError, TypeError):
            self._at = Position(*json.loads(self._place.read_text()))
            fresh = False
        if fresh:
            with suppress(FileNotFoundError):
                status = self._console.stat()
                self._at = Position(status.st_ino, status.st_size)
            self._save()
        self.reopen()

    def reopen(self) -> None:
        """Open a new log file by the old name. kubelet has renamed the old file."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        opened = os.open(self._log_path, flags, 0o640)
        self._shut(self._to)
        self._to = opened

    def finish(self) -> None:
        """Copy the rest of an ended guest's output, and forget the position.

        An error, for example of a broken disk, is only logged.
        """
        try:
            try:
                while self.copy():
                    pass
                self._write(self._lines.flush(self._stamp()))
            finally:
                self._place.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: %s", self._log_path, error, extra={"code": "log_failed"})

    def close(self) -> None:
        """Close the files. The next process continues at the stored position."""
        self._shut(self._from)
        self._shut(self._to)
        self._from = self._to = -1

    async def run(self) -> None:
        while True:
            try:
                more = self.copy()
                self._flush_quiet()
            except OSError as error:
                more = False
                self._warn(error)
            await asyncio.sleep(0 if more else LOOK_S)

    def copy(self) -> bool:
        """Copy the next piece of the console; return True if there may be more.

        Raises OSError. After an error, the next call writes the unwritten lines first.
        """
        if self._unwritten:
            self._write(b"")
        if self._from < 0 and not self._open_console():
            return False
        data = os.pread(self._from, READ_BYTES, self._at.offset)
        if not data:
            return self._next_file()
        lines = self._lines.feed(data, self._stamp())
        self._fed_s = asyncio.get_running_loop().time()
        self._at = self._at._replace(offset=self._at.offset + len(data))
        self._write(lines)
        return True

    def _open_console(self) -> bool:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._from = os.open(self._console, flags)
        except FileNotFoundError:
            return False
        status = os.fstat(self._from)
        if status.st_ino != self._at.inode or status.st_size < self._at.offset:
            self._at = Position(status.st_ino, 0)
        return True

    def _next_file(self) -> bool:
        """Continue with the next console file. The agent begins a new file for each boot."""
        try:
            same = self._console.stat().st_ino == self._at.inode
        except FileNotFoundError:
            return False
        if same:
            if os.fstat(self._from).st_size < self._at.offset:
                self._at = self._at._replace(offset=0)  # the file was truncated
                return True
            return False
        self._shut(self._from)
        self._from = -1
        return self._open_console()

    def _flush_quiet(self) -> None:
        if self._lines.pending and asyncio.get_running_loop().time() - self._fed_s > QUIET_S:
            self._write(self._lines.flush(self._stamp()))

    def _write(self, data: bytes) -> None:
        """Write the unwritten lines and `data`, and then store the position.

        Raises OSError.
        """
        self._unwritten += data
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._to, self._unwritten) :]
        self._save()

    def _warn(self, error: OSError) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            log.warning("%s: %s", self._log_path, error, extra={"code": "log_failed"})

    def _stamp(self) -> str:
        time_ns = self._sources.time_ns()
        moment = datetime.fromtimestamp(time_ns // 10**9, UTC)
        return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09d}Z"

    def _save(self) -> None:
        """Store the position of the first byte of the console that is not in the log yet."""
        written = self._at._replace(offset=max(0, self._at.offset - self._lines.pending))
        part = self._place.with_suffix(".part")
        part.write_text(json.dumps(written))
        part.replace(self._place)

    @staticmethod
    def _shut(descriptor: int) -> None:
        if descriptor >= 0:
            os.close(descriptor)
