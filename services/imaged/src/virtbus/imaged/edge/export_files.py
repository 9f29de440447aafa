"""Keeps the exported files of operations: `<disks>/exports/<id>/disk.<format>` and `note.json`.

The rename of the finished part to its final name publishes an export. A crash before the rename
leaves a part, which the next attempt replaces. An export is a copy, so it may expire by its age.
"""

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.disk_space import DiskSpace
from virtbus.imaged.edge.export_part import ExportPart
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import check_uid, is_uid
from virtbus.schemas.operation import ExportResult
from virtbus.schemas.wire import decode, encode_json, validate

log = logging.getLogger(__name__)

FOLDER = "exports"
PART = "part"
PACKED = "packed"
NOTE = "note.json"
LINK_KEY = "link-key"
MAX_NOTE_BYTES = 4096
_PRIVATE = 0o700
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


class OpenedExport(NamedTuple):
    """A published file with the key of its links. The caller closes `descriptor`."""

    result: ExportResult
    key: bytes
    descriptor: int

    def read(self, at: int, most: int) -> bytes:
        """Return bytes of the file; empty at its end, or if the file was removed."""
        if not os.fstat(self.descriptor).st_nlink:
            return b""
        return os.pread(self.descriptor, most, at)


class ExportFiles:
    """The exports of a node. All methods block on the disk."""

    def __init__(self, disks: Path, space: DiskSpace) -> None:  # `begin` makes the root
        self._root = disks / FOLDER
        self.space = space

    def path(self, export: str, format_: str) -> Path:
        return self._root / check_uid(export) / f"disk.{format_}"

    def published(self, export: str) -> ExportResult | None:
        """Return a published export, None if there is none; raises 503 `store_error`."""
        try:
            with self._open(export) as folder:
                note = validate(
                    ExportResult, decode(openat2.read_small(NOTE, folder, MAX_NOTE_BYTES))
                )
                os.stat(Path(note.path).name, dir_fd=folder, follow_symlinks=False)
                return note
        except (FileNotFoundError, VirtbusError):
            return None  # an attempt that a crash ended left no file, or no readable note
        except OSError as error:
            raise store_error(error) from error

    def link_key(self, export: str, new: bytes) -> bytes:
        """Return the key of a published export's links; raises as `begin`.

        If the export has no key yet, `new` becomes its key. The removal of the export removes the
        key, and so invalidates all links.
        """
        try:
            with self._open(export) as folder:
                try:
                    return openat2.read_small(LINK_KEY, folder, MAX_NOTE_BYTES)
                except FileNotFoundError:
                    openat2.replace(LINK_KEY, new, folder)
                    return new
        except OSError as error:
            raise store_error(error) from error

    def opened(self, export: str, name: str) -> OpenedExport | None:
        """Open the file `name` of an export; None if there is none, or no link was made.

        Raises as `begin`.
        """
        result = self.published(export)
        if result is None or Path(result.path).name != name:
            return None
        try:
            with self._open(export) as folder:
                key = openat2.read_small(LINK_KEY, folder, MAX_NOTE_BYTES)
                return OpenedExport(result, key, openat2.open_file(name, folder))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error) from error

    def begin(self, export: str) -> ExportPart:
        """Return a new, empty part; raises 503 `store_error` or `disk_full`."""
        try:
            self.remove(export)
            openat2.make_passable(self._root)
            with openat2.opened_directory(self._root) as root:
                folder = openat2.open_directory(check_uid(export), root, _PRIVATE)
            try:
                return ExportPart(openat2.open_file(PART, folder, NEW))
            finally:
                os.close(folder)
        except OSError as error:
            raise store_error(error) from error

    def begin_packed(self, export: str) -> ExportPart:
        try:
            with self._open(export) as folder:
                return ExportPart(openat2.open_file(PACKED, folder, NEW))
        except OSError as error:
            raise store_error(error) from error

    def publish(self, export: str, name: str, part: ExportPart, result: ExportResult) -> None:
        """Give the finished part `name` its final name, durable on return; raises as `begin`."""
        try:
            os.fsync(part.descriptor)
            with self._open(export) as folder:
                openat2.replace(NOTE, encode_json(result), folder)
                if name != PART:  # a crash must not leave the unpacked disk next to the result
                    openat2.remove(PART, folder)
                final = Path(result.path).name
                os.rename(name, final, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            raise store_error(error) from error

    def remove(self, export: str) -> None:
        """Remove an export, or the remains of an attempt; raises 503 `store_error`."""
        try:
            with self._open(export) as folder:
                for name in openat2.names(folder):
                    openat2.remove(name, folder)
            with openat2.opened_directory(self._root) as root:
                os.rmdir(export, dir_fd=root)
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_error(error) from error
        with contextlib.suppress(OSError):  # other exports may be in it
            self._root.rmdir()

    def expire(self, older_s: float, busy: Collection[str]) -> list[str]:
        """Remove exports without a change for `older_s`, except `busy` ids; return removed ids.

        Log the exports that cannot be removed.
        """
        try:
            with openat2.opened_directory(self._root) as root:
                found = {
                    name: os.stat(name, dir_fd=root, follow_symlinks=False).st_mtime
                    for name in openat2.names(root)
                    if is_uid(name) and name not in busy
                }
        except FileNotFoundError:
            return []
        removed = []
        for name in (name for name, at_s in found.items() if at_s < time.time() - older_s):
            try:
                self.remove(name)
            except VirtbusError as error:
                log.warning("export %s remains: %s", name, error, extra={"code": error.reason})
            else:
                removed.append(name)
        return removed

    @contextlib.contextmanager
    def _open(self, export: str) -> Iterator[int]:
        with (
            openat2.opened_directory(self._root) as root,
            openat2.opened_directory(check_uid(export), root) as folder,
        ):
            yield folder
