"""Keeps backups: `<backup_dir>/<id>/{<disk>.qcow2,backup.json,verified.json}` (ADR 0068).

A backup is complete or absent: it is made as `.part-<id>`, and the rename to `<id>` publishes it. A
delete first renames the backup to `.gone-<id>`. `draft.json` in a part names the parent, so that no
delete removes the parent meanwhile. Other programs may write to the directory, so its content is
checked when it is read. The directory may be slow, and no guest may wait for it. So a guest's QEMU
writes to the disk of `state_dir`, in `disks/backups/<id>/`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from virtbus.imaged.core.overlay import build
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.backup_notes import (
    BACKUPS,
    DRAFT,
    MANIFEST,
    PART,
    UNREADABLE,
    BackupNotes,
)
from virtbus.imaged.edge.backup_staging import (
    NEW,
    BackupStaging,
    existing,
    remove_folder,
)
from virtbus.imaged.edge.disk_files import SUFFIX, write_layout
from virtbus.imaged.edge.export_conversion import OpenedSource
from virtbus.imaged.edge.export_part import ExportPart
from virtbus.imaged.edge.partial_download import store_error, translated
from virtbus.schemas.backup import (
    MAX_CHAIN,
    BackupCheck,
    BackupDisk,
    BackupManifest,
    HeldBackup,
    HeldBackups,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid, is_uid
from virtbus.schemas.wire import encode_json

log = logging.getLogger(__name__)

CHECK = "verified.json"
_GONE = ".gone-"
PAGE = 100
PAGE_BYTES = 256 * 1024
"""Size limit of a page. A page has at least one backup, which may be larger."""
_PRIVATE = 0o700


class BackupFiles:
    """The backups of a node. All methods block on the disk.

    They raise VirtbusError 503 `store_error` or `disk_full` for an error of the file system.
    """

    def __init__(self, disks: Path, root: Path) -> None:
        self.staging = BackupStaging(disks)
        self.root = root
        self.notes = BackupNotes(root)

    # --- read -----------------------------------------------------------------------------
    def chain(self, backup: str) -> tuple[BackupManifest, ...]:
        """Return the manifests of a backup and of all backups that it rests on, the newest first.

        Raises:
            VirtbusError: 404 `backup_not_here`. 409 `backup_damaged`: a backup of the chain is
                missing or of another VM, or the chain is too long (`MAX_CHAIN`). 422
                `backup_unreadable`.
        """
        found: list[BackupManifest] = []
        wanted = backup
        while wanted:
            one = self.notes.complete(wanted)
            if one is None and not found:
                message = f"this node has no backup {backup}; `virtbus backup list` shows all"
                raise VirtbusError(Code.NOT_FOUND, "backup_not_here", message)
            if one is None:
                raise damaged(backup, f"it rests on the backup {wanted}, which is missing")
            if found and one.uid != found[0].uid:
                raise damaged(backup, f"it rests on {wanted}, which is of another VM")
            if len(found) == MAX_CHAIN:
                raise damaged(backup, f"its chain is longer than {MAX_CHAIN}")
            found.append(one)
            wanted = one.parent
        return tuple(found)

    def of_vm(self, uid: str) -> list[BackupManifest]:
        """Return the readable backups of a VM without their specs, the newest first."""
        found = []
        for backup in reversed(self.notes.ids()):
            with contextlib.suppress(VirtbusError):
                one = self.notes.brief(backup)
                if one is not None and one.uid == uid:
                    found.append(one)
        return found

    def next_number(self) -> int:
        """Return a number above those of all backups that can be read."""
        highest = 0
        for backup in self.notes.ids():
            with contextlib.suppress(VirtbusError):
                if (one := self.notes.brief(backup)) is not None:
                    highest = max(highest, one.number)
        return highest + 1

    def page(self, after: str) -> HeldBackups:
        """Return the backups with an id above `after`, the oldest first, without their specs."""
        children = self.notes.children()
        ids = [one for one in self.notes.ids() if one > after]
        items: list[HeldBackup] = []
        size_bytes = 0
        for id_ in ids[:PAGE]:
            held = self._held(id_, children, self.notes.brief)
            size_bytes += len(encode_json(held))
            if items and size_bytes > PAGE_BYTES:
                break
            items.append(held)
        return HeldBackups(items=tuple(items), more=len(ids) > len(items))

    def held(self, backup: str) -> HeldBackup | None:
        if check_uid(backup) not in self.notes.ids():
            return None
        return self._held(backup, self.notes.children(), self.notes.complete)

    def _held(
        self,
        backup: str,
        children: dict[str, list[str]],
        read: Callable[[str], BackupManifest | None],
    ) -> HeldBackup:
        manifest = check = None
        with contextlib.suppress(VirtbusError):
            manifest = read(backup)
        with contextlib.suppress(VirtbusError):
            check = self.notes.note(BackupCheck, backup, CHECK)
        below = tuple(children.get(backup, ()))
        return HeldBackup(id=backup, manifest=manifest, check=check, children=below)

    def check_of(self, backup: str) -> BackupCheck | None:
        """Return the result of the last verification; None if none can be read."""
        try:
            return self.notes.note(BackupCheck, check_uid(backup), CHECK)
        except VirtbusError as error:
            if error.reason != UNREADABLE:
                raise
            return None

    # --- write ----------------------------------------------------------------------------
    def begin(self, draft: BackupManifest) -> None:
        """Make an empty part, whose draft prevents a delete of the parent.

        Raises:
            VirtbusError: 503 `backup_dir_missing`.
        """
        name = PART + draft.id
        if not self.root.is_dir():
            message = f"the directory {self.root} does not exist; mount it, or make it for imaged"
            raise VirtbusError(Code.UNAVAILABLE, "backup_dir_missing", message)
        with translated(BACKUPS), openat2.opened_directory(self.root) as root:
            remove_folder(name, root)
            os.close(openat2.open_directory(name, root, _PRIVATE))
            with openat2.opened_directory(name, root) as part:
                openat2.replace(DRAFT, encode_json(draft), part)
                os.fsync(part)
            os.fsync(root)

    def keep(self, backup: str) -> bool:
        """Set a part's time of change to now; return False if the part does not exist.

        QEMU may write staged files for days, and the part does not change meanwhile. Without this
        call, each node that uses the directory would remove the part by its age.
        """
        if self.draft(backup) is None:
            return False
        with translated(BACKUPS), openat2.opened_directory(self.root) as root:
            os.utime(PART + backup, dir_fd=root, follow_symlinks=False)
        return True

    def draft(self, backup: str) -> BackupManifest | None:
        return self.notes.note(BackupManifest, PART + check_uid(backup), DRAFT)

    def new_disk(self, backup: str, disk: str, size_bytes: int = 0) -> ExportPart:
        """Return a new, open file for a disk; the caller closes it.

        With `size_bytes` the file is an empty qcow2 disk of that size.
        """
        with translated(BACKUPS), self.notes.opened(PART + check_uid(backup)) as part:
            openat2.remove(disk + SUFFIX, part)
            made = ExportPart(openat2.open_file(disk + SUFFIX, part, NEW))
            if size_bytes:
                try:
                    write_layout(build(size_bytes), made.descriptor)
                except OSError:
                    made.close()
                    raise
            return made

    def publish(self, made: BackupManifest) -> None:
        """Make a backup complete, durable on return; no effect on a complete backup.

        Raises:
            VirtbusError: 409 `backup_damaged`: its parent is gone. The errors of `chain` for the
                parent.
        """
        if self.notes.complete(made.id) is not None:
            return
        if made.parent:
            if self.notes.complete(made.parent) is None:
                raise damaged(made.id, f"it rests on the backup {made.parent}, which is missing")
            self.chain(made.parent)
        name = PART + made.id
        with translated(BACKUPS), openat2.opened_directory(self.root) as root:
            with openat2.opened_directory(name, root) as part:
                openat2.replace(MANIFEST, encode_json(made), part)
                openat2.remove(DRAFT, part)
                os.fsync(part)
            os.rename(name, made.id, src_dir_fd=root, dst_dir_fd=root)
            os.fsync(root)

    def note_check(self, backup: str, check: BackupCheck) -> None:
        with translated(BACKUPS), self.notes.opened(check_uid(backup)) as folder:
            openat2.replace(CHECK, encode_json(check), folder)

    def drop(self, backup: str) -> None:
        """Remove the remains of an attempt; a complete backup stays."""
        self.staging.remove(backup)
        with existing(self.root) as root:
            if root is not None:
                remove_folder(PART + check_uid(backup), root)

    def remove(self, backup: str) -> bool:
        """Remove a complete backup; return False if there is none.

        Raises:
            VirtbusError: 409 `backup_needed`: an increment rests on it. 503 `store_error`: another
                backup cannot be read, and may rest on this one.
        """
        self._refuse_if_needed(check_uid(backup))
        gone = _GONE + backup
        try:
            with openat2.opened_directory(self.root) as root:
                os.rename(backup, gone, src_dir_fd=root, dst_dir_fd=root)
                os.fsync(root)
                try:  # an increment that was begun meanwhile may rest on it
                    self._refuse_if_needed(backup)
                except VirtbusError:
                    os.rename(gone, backup, src_dir_fd=root, dst_dir_fd=root)
                    raise
                remove_folder(gone, root)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error, BACKUPS) from error
        return True

    def _refuse_if_needed(self, backup: str) -> None:
        if needed := self.notes.children(of=backup).get(backup):
            message = (
                f"the backups {', '.join(needed)} rest on {backup}; delete them first, "
                "the newest before the others"
            )
            raise VirtbusError(Code.CONFLICT, "backup_needed", message)


def opened_disk(files: BackupFiles, backup: str, disk: str) -> OpenedSource:
    """Open a disk of a backup, and the same disk of each backup that it rests on.

    Raises:
        VirtbusError: the errors of `chain`. 404 `no_disk`. 409 `disk_unreadable`, `backup_damaged`.
    """
    chain = files.chain(backup)
    found = [_disk(one, disk) for one in chain]
    if found[0] is None:
        names = ", ".join(one.name for one in chain[0].disks) or "(none)"
        message = f"the backup {backup} has the disks {names}"
        raise VirtbusError(Code.NOT_FOUND, "no_disk", message)
    if None in found:
        raise damaged(backup, f"a backup that it rests on does not have the disk {disk}")
    paths = tuple(files.root / one.id / f"{disk}{SUFFIX}" for one in chain)
    size = found[0].virtual_size_bytes
    return OpenedSource(paths[0], None, size, "", layers=paths[1:])


def expire(
    staging: BackupStaging, files: BackupFiles | None, older_s: float, busy: Collection[str]
) -> list[str]:
    """Remove staged files and parts without a change for `older_s`; those of `busy` ids stay.

    Finish deletes that a crash interrupted. Return the names of the removed folders; log the
    folders that cannot be removed.
    """
    before_s, gone = time.time() - older_s, []
    roots = [] if files is None else [(files.root, PART), (files.root, _GONE)]
    for root, prefix in (*roots, (staging.root, "")):
        with _logged(str(root)), existing(root) as directory:
            if directory is None:
                continue
            for name in openat2.names(directory):
                id_ = name.removeprefix(prefix)
                if not name.startswith(prefix) or not is_uid(id_) or id_ in busy:
                    continue
                with _logged(name), translated(BACKUPS):
                    if prefix == _GONE or _changed_s(name, directory) < before_s:
                        remove_folder(name, directory)
                        gone.append(name)
    return gone


@contextlib.contextmanager
def _logged(name: str) -> Iterator[None]:
    try:
        yield
    except VirtbusError as error:
        extra = {"code": error.reason}
        log.warning("remains of backups stay in %s: %s", name, error, extra=extra)


def damaged(backup: str, why: str) -> VirtbusError:
    """Return 409 `backup_damaged`: the backup cannot be restored."""
    message = f"the backup {backup} is damaged: {why}; use another one, `virtbus backup list`"
    return VirtbusError(Code.CONFLICT, "backup_damaged", message)


def _disk(manifest: BackupManifest, name: str) -> BackupDisk | None:
    return next((one for one in manifest.disks if one.name == name), None)


def _changed_s(name: str, directory: int) -> float:
    """Return the time of the last change of a folder or of a file in it."""
    times = [os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime]
    with contextlib.suppress(OSError), openat2.opened_directory(name, directory) as folder:
        times += [
            os.stat(one, dir_fd=folder, follow_symlinks=False).st_mtime
            for one in openat2.names(folder)
        ]
    return max(times)
