"""Keeps the last answers of a runtime, in memory and in one file for each kind of answer.

The answers are served while the runtime does not answer. A file is replaced atomically, so a kill
at any instant leaves the earlier or the later file. Each file has a checksum: a file that a loss of
power has damaged counts as unknown, and never as a short list. Written files are synced to the disk
within about a second (SYNC_S).
"""

import asyncio
import fcntl
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from virtbus.bus.runtime.threads import to_end
from virtbus.criproxy.core.entries import Entry
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

SYNC_S = 1.0
_MAGIC = b"virtbus last answers 1\n"
_LENGTH_BYTES = 4
_PART = ".part"

Read = Callable[[bytes], Entry]
"""Returns the entry of a stored message; raises an Exception for a message that it cannot read."""


class LastAnswers:
    """The answers of one kind of call, by key.

    `known` becomes True when the first complete answer is kept, or when `load` finds a valid file.
    The file is written only if `known` is True. A failed write is logged, and the next write has
    all answers.
    """

    def __init__(self, path: Path, writer: ThreadPoolExecutor, dirty: set[Path]) -> None:
        self._path = path
        self._writer = writer
        self._dirty = dirty
        self.known = False
        self.all: dict[str, Entry] = {}

    def load(self, read: Read) -> None:
        """Read the file, if it exists. A damaged file is logged, and counts as unknown."""
        try:
            body = self._path.read_bytes()
        except FileNotFoundError:
            return
        try:
            entries = [read(raw) for raw in _parts(body)]
        except Exception as error:  # noqa: BLE001  a file with any error counts as unknown
            log.warning("%s: %s", self._path, error, extra={"code": "answers_torn"})
            return
        self.all = {one.key: one for one in entries}
        self.known = True

    async def put(self, entry: Entry) -> None:
        self.all = {**self.all, entry.key: entry}
        await self._save()

    async def drop(self, keys: Iterable[str]) -> None:
        left = {key: one for key, one in self.all.items() if key not in set(keys)}
        if len(left) < len(self.all):
            self.all = left
            await self._save()

    async def replace(self, entries: dict[str, Entry]) -> None:
        if entries == self.all and self.known:
            return
        self.all, self.known = entries, True
        await self._save()

    async def _save(self) -> None:
        if not self.known:
            return  # the file would lack unknown entries, and look like a short list
        entries, path = self.all, self._path
        loop = asyncio.get_running_loop()
        try:
            await to_end(loop.run_in_executor(self._writer, _write, path, entries))
        except OSError as error:
            log.warning("cannot write %s: %s", path, error, extra={"code": "answers_unwritable"})
        self._dirty.add(path)


class AnswerFolder:
    """The folder `<state_dir>/criproxy`, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._dirty: set[Path] = set()
        self._lock = -1

    def open(self) -> None:
        """Make and lock the folder; raises VirtbusError 409 `criproxy_running`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another virtbus-criproxy works in {self._folder}; stop it first"
            raise VirtbusError(Code.CONFLICT, "criproxy_running", message) from None

    def kind(self, runtime: str, call: str) -> LastAnswers:
        folder = self._folder / runtime
        folder.mkdir(mode=0o700, exist_ok=True)
        return LastAnswers(folder / call, self._writer, self._dirty)

    async def sync(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SYNC_S)
            paths = set(self._dirty)
            self._dirty -= paths
            if paths:
                await to_end(loop.run_in_executor(self._writer, _sync, paths))

    def close(self) -> None:
        self._writer.shutdown()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _write(path: Path, entries: dict[str, Entry]) -> None:
    raws = (one.raw for one in entries.values())
    parts = (part for raw in raws for part in (len(raw).to_bytes(_LENGTH_BYTES), raw))
    body = b"".join(parts)
    part = path.with_suffix(_PART)
    part.write_bytes(_MAGIC + zlib.crc32(body).to_bytes(_LENGTH_BYTES) + body)
    part.replace(path)


def _parts(stored: bytes) -> list[bytes]:
    head = len(_MAGIC) + _LENGTH_BYTES
    checksum, body = stored[len(_MAGIC) : head], stored[head:]
    if not stored.startswith(_MAGIC) or checksum != zlib.crc32(body).to_bytes(_LENGTH_BYTES):
        text = "the file is torn, or another version wrote it; the next answers replace it"
        raise ValueError(text)
    found, at = [], 0
    while at < len(body):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(body[at:start])
        found.append(body[start:at])
    return found


def _sync(paths: Iterable[Path]) -> None:
    for path in {*paths, *(path.parent for path in paths)}:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        except OSError as error:
            log.warning("cannot sync %s: %s", path, error, extra={"code": "answers_unwritable"})
        finally:
            os.close(descriptor)
