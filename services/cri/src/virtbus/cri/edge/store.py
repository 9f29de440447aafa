"""Stores virtbus-cri's records on the node: a folder for each kind, a JSON file for each record.

A record is on disk before an answer mentions the record. All writes run in one thread, in the order
of the calls, so an earlier state of a record never replaces a later state.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from virtbus.bus.runtime.threads import to_end
from virtbus.cri.core.image_record import PulledImage
from virtbus.cri.core.node import KnownNode
from virtbus.cri.core.pod import Pod, Removal
from virtbus.cri.core.stored_record import StoredRecord
from virtbus.cri.core.virtlet_objects import ClusterObjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.version import check_version

log = logging.getLogger(__name__)

_SUFFIX, _PART, _TORN = ".json", ".part", ".torn"
Record = TypeVar("Record", bound=StoredRecord)


class RecordFolder(Generic[Record]):
    """A folder of records of one kind, by key."""

    def __init__(self, folder: Path, kind: type[Record], writer: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._kind = kind
        self._writer = writer

    def load(self) -> dict[str, Record]:
        """Return all records by key. Rename each unreadable file to `.torn`, and log its name.

        Raises:
            VirtbusError: 422 `state_older`, `state_newer`: another version wrote a file.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"*{_PART}"):
            leftover.unlink(missing_ok=True)
        found = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            record = _read(path, self._kind)
            if record is None:
                log.error("%s is unreadable: set aside", path, extra={"code": "record_torn"})
                path.replace(path.with_suffix(_TORN))
            else:
                found[path.stem] = record
        return found

    async def put(self, key: str, record: Record) -> None:
        """Store a record durably. A cancelled call completes the write, too.

        Raises VirtbusError 503 `state_unwritable`.
        """
        body = record.model_dump_json().encode()
        await self._run(lambda: _write(self._path(key), body))

    async def remove(self, key: str) -> None:
        """Remove a record durably. No effect if the record does not exist.

        Raises VirtbusError 503 `state_unwritable`.
        """
        await self._run(lambda: _remove(self._path(key)))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    async def _run(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await to_end(loop.run_in_executor(self._writer, work))
        except OSError as error:
            message = f"cannot write {self._folder}: {error}; free space on the disk or repair it"
            raise VirtbusError(Code.UNAVAILABLE, "state_unwritable", message) from error


class Store:
    """The folder `<state_dir>/cri`, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self.pods = RecordFolder(folder / "pods", Pod, self._writer)
        self.images = RecordFolder(folder / "images", PulledImage, self._writer)
        self.removals = RecordFolder(folder / "removals", Removal, self._writer)
        self.nodes = RecordFolder(folder / "node", KnownNode, self._writer)
        self.cluster = RecordFolder(folder / "cluster", ClusterObjects, self._writer)
        self._lock = -1

    def open(self) -> None:
        """Make and lock the folder.

        Raises VirtbusError 409 `cri_running`.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another virtbus-cri works in {self._folder}; stop it first"
            raise VirtbusError(Code.CONFLICT, "cri_running", message) from None

    def close(self) -> None:
        self._writer.shutdown()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _read(path: Path, kind: type[Record]) -> Record | None:
    try:
        record = kind.model_validate_json(path.read_bytes())
    except ValidationError:
        return None
    check_version(
        str(path),
        record.schema_version,
        reasons=("state_older", "state_newer"),
        next_step="install the newer virtbus again, or remove the pod with it first",
    )
    return record


def _write(path: Path, body: bytes) -> None:
    part = path.with_suffix(_PART)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
