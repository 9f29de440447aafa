"""Reads the manifests of backups, and finds the backups that rest on another backup (ADR 0068)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.partial_download import store_error
from virtbus.schemas.backup import BackupManifest
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid, is_uid
from virtbus.schemas.model import Model
from virtbus.schemas.wire import decode, encode_json, validate

Note = TypeVar("Note", bound=Model)
MANIFEST, DRAFT = "backup.json", "draft.json"
PART = ".part-"
BACKUPS = "the backup directory"
UNREADABLE = "backup_unreadable"
MAX_NOTE_BYTES = 4 * 1024**2
MAX_BRIEFS = 8192
"""Limit of manifests in memory; other manifests are read each time."""
MAX_BRIEF_BYTES = 8192
"""Limit of one manifest in memory."""


class BackupNotes:
    """The manifests and drafts in a directory of backups. All methods block on the disk.

    They raise VirtbusError 503 `store_error` for an error of the file system.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._briefs: dict[str, BackupManifest] = {}
        """Manifests without their specs, by id: a complete backup does not change."""

    def complete(self, backup: str) -> BackupManifest | None:
        """Return the manifest of a complete backup; None if there is none.

        Raises:
            VirtbusError: 422 `backup_unreadable`.
        """
        found = self.note(BackupManifest, check_uid(backup), MANIFEST)
        if found is not None and found.id != backup:
            raise _unreadable(backup, "its manifest is that of another backup")
        return found

    def brief(self, backup: str) -> BackupManifest | None:
        """Return a manifest without its spec, from memory if it was read before.

        Errors, and the meaning of None, are those of `complete`.
        """
        if (known := self._briefs.get(backup)) is not None:
            return known
        if (made := self.complete(backup)) is None:
            return None
        brief = made.model_copy(update={"spec": {}})
        if len(self._briefs) < MAX_BRIEFS and len(encode_json(brief)) <= MAX_BRIEF_BYTES:
            self._briefs[backup] = brief
        return brief

    def children(self, *, of: str = "") -> dict[str, list[str]]:
        """Return the increments by the backup that they rest on.

        Unfinished increments are included.

        Raises:
            VirtbusError: 503 `store_error`. With `of`, an unreadable other backup is also an error,
                because it may rest on the backup `of`.
        """
        found: dict[str, list[str]] = {}
        for folder in self._folders():
            try:
                parent = self._parent(folder)
            except VirtbusError as error:
                if of in {"", folder}:
                    continue
                message = f"{folder} cannot be read, and may rest on {of}: {error}"
                raise VirtbusError(Code.UNAVAILABLE, error.reason, message) from error
            child = folder.removeprefix(PART)
            if parent and is_uid(child) and child not in found.setdefault(parent, []):
                found[parent].append(child)
        return found

    def _folders(self) -> Iterator[str]:
        """Yield the parts, then the complete backups.

        A part may be published while the caller reads the parts. The complete backups are listed
        afterwards, so they include such a part.
        """
        yield from (name for name in self.names() if name.startswith(PART))
        ids = self.ids()
        for gone in set(self._briefs) - set(ids):
            self._briefs.pop(gone, None)
        yield from ids

    def _parent(self, folder: str) -> str:
        if not folder.startswith(PART):
            with contextlib.suppress(VirtbusError):
                return known.parent if (known := self.brief(folder)) is not None else ""
        return self._named(folder, DRAFT) or self._named(folder, MANIFEST)

    def _named(self, folder: str, name: str) -> str:
        """Return the parent that a note names. The note need not fit this version's model."""
        data = self._read(folder, name)
        parent: object = ""
        with contextlib.suppress(VirtbusError):  # no JSON: such a backup is lost in any case
            note = None if data is None else decode(data)
            parent = note.get("parent") if isinstance(note, dict) else ""
        return parent.lower() if isinstance(parent, str) else ""

    def names(self) -> list[str]:
        """Return all names in the directory, sorted; none if it does not exist."""
        try:
            with openat2.opened_directory(self.root) as root:
                return openat2.names(root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise store_error(error, BACKUPS) from error

    def ids(self) -> list[str]:
        return [name for name in self.names() if is_uid(name)]

    def _read(self, folder: str, name: str) -> bytes | None:
        try:
            with self.opened(folder) as directory:
                return openat2.read_small(name, directory, MAX_NOTE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error, BACKUPS) from error

    def note(self, model: type[Note], folder: str, name: str) -> Note | None:
        """Return a note in a folder, None if it is missing; raises 422 `backup_unreadable`."""
        data = self._read(folder, name)
        if data is None:
            return None
        try:
            return validate(model, decode(data))
        except VirtbusError as error:
            raise _unreadable(folder, str(error)) from error

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        with (
            openat2.opened_directory(self.root) as root,
            openat2.opened_directory(folder, root) as directory,
        ):
            yield directory


def _unreadable(backup: str, why: str) -> VirtbusError:
    message = f"the description of the backup {backup} cannot be read: {why}"
    return VirtbusError(Code.UNSUPPORTED, UNREADABLE, message)
