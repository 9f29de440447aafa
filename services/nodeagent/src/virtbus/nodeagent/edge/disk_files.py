"""Checks a VM's disk files, and pins each under a name that only the agent can change.

imaged owns `disks/` and `images/`. So a path there may be another file when libvirt, which is root,
opens it and changes its owner. Therefore each checked disk gets a hard link in the VM's own folder,
which only the agent can write, and libvirt gets that path. Images are read-only: libvirt must not
change their owner.
"""

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from virtbus.bus.runtime.image_locks import locked
from virtbus.bus.runtime.pool_settings import PoolSettings
from virtbus.nodeagent.core.disk_sources import (
    DATA,
    DISKS,
    HEAD_BYTES,
    IMAGES,
    DiskSource,
    check_disk,
    check_image,
    disk_name,
    disk_sources,
    refused,
    volume_place,
)
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DIRECTORY = _ROOT | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Non-blocking, so that opening a FIFO cannot hang."""
PINNED = "disk-"
"""`<state_dir>/vms/<uid>/disk-<volume>.qcow2`: our own name of a disk."""


class HostDiskFiles:
    """The `DiskFiles` port."""

    def __init__(self, state_dir: Path, pools: Mapping[str, PoolSettings] | None = None) -> None:
        self._state = state_dir
        self._pools = pools or {}

    async def sources(
        self, record: VmRecord, made: Mapping[str, MadeDisk]
    ) -> dict[str, DiskSource]:
        """Return every disk of the record, checked now, under names that only we can change.

        Raises:
            VirtbusError: 409 `disk_refused`: a file is not regular or has several names, or its
                header names another file.
        """
        wanted = disk_sources(self._state, record, made, self._pools)

        def judge() -> dict[str, DiskSource]:
            drop_pins(self._state, record)
            return {name: self._judged(record.uid, name, one) for name, one in wanted.items()}

        return await in_thread(judge)

    async def opened(self, ref: VolumeRef) -> bool:
        """Return True if any QEMU of this host has the volume's disk open."""

        def ask() -> bool:
            try:
                *folders, name = volume_place(ref)
                with opened_beneath(self._state / DISKS, tuple(folders), name) as descriptor:
                    return locked(descriptor)
            except FileNotFoundError:
                return False

        return await in_thread(ask)

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        """Remove our names of media that are not among `sources`; no drive has them any more."""
        kept = {source.path for source in sources.values()}

        def drop() -> None:
            for path in (self._state / "vms" / uid).glob(f"{PINNED}*.*.qcow2"):
                if str(path) not in kept:
                    path.unlink(missing_ok=True)

        await in_thread(drop)

    def _judged(self, uid: str, volume: str, source: DiskSource) -> DiskSource:
        if source.network is not None:
            return source
        try:
            if source.backing_path and source.backing_format is not None:
                image = Path(source.backing_path).name
                with opened_beneath(self._state / IMAGES, (DATA,), image) as descriptor:
                    _check_file(volume, descriptor, names=1)
                    head = os.pread(descriptor, HEAD_BYTES, 0)
                    check_image(volume, head, source.backing_format)
            *folders, name = source.place
            with opened_beneath(self._state / DISKS, tuple(folders), name) as descriptor:
                check_disk(volume, os.pread(descriptor, HEAD_BYTES, 0), source)
                path = self._pinned(uid, volume, source.pin, descriptor)
        except OSError as error:
            raise refused(volume, f"it cannot be opened: {error.strerror}") from error
        return dataclasses.replace(source, path=path or source.path)

    def _pinned(self, uid: str, volume: str, pin: str, descriptor: int) -> str:
        """Return the path of our hard link to an open disk.

        Empty if `disks/` is on another filesystem, where a hard link is impossible.
        """
        path = self._state / "vms" / uid / f"{PINNED}{pin}"
        kept = path.lstat() if os.path.lexists(path) else None
        found = os.fstat(descriptor)
        ours = kept is not None and os.path.samestat(kept, found)
        _check_file(volume, descriptor, names=2 if ours else 1)
        if ours:
            return str(path)
        path.unlink(missing_ok=True)
        folder = os.open(path.parent, _DIRECTORY)
        try:
            os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return ""
        finally:
            os.close(folder)
        return str(path)


def drop_pins(state_dir: Path, record: VmRecord) -> None:
    """Remove our names of volumes that the VM does not hold any more. No guest has them.

    A second name would make the volume unusable for its next VM. The last name of a file stays.
    """
    disks = {*(one.name for one in record.spec.volumes), *record.volume_refs}
    names = {f"{PINNED}{disk_name(one)}": one for one in disks}
    for path in (state_dir / "vms" / record.uid).glob(f"{PINNED}*"):
        name = f"{path.name.partition('.')[0]}.qcow2"  # that of a medium has a part of its digest
        ref = record.volume_refs.get(names.get(name, ""))
        kept = name in names
        if ref is not None:
            kept = _same(path, state_dir.joinpath(DISKS, *volume_place(ref)))
        if not kept and path.lstat().st_nlink > 1:
            path.unlink(missing_ok=True)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def opened_beneath(root: Path, folders: tuple[str, ...], name: str) -> Iterator[int]:
    """Open the file `name` below `root`; `root` itself may be a symlink.

    Raises:
        OSError: ELOOP or ENOTDIR for a symlink in the path.
    """
    at = os.open(root, _ROOT)
    try:
        for folder in folders:
            deeper = os.open(folder, _DIRECTORY, dir_fd=at)
            os.close(at)
            at = deeper
        descriptor = os.open(name, _FILE, dir_fd=at)
    finally:
        os.close(at)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_file(volume: str, descriptor: int, *, names: int) -> None:
    """Raise `disk_refused` unless the file is regular and has `names` hard links.

    With more links it could be a foreign file.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise refused(volume, "it is no regular file")
    if found.st_nlink != names:
        raise refused(volume, f"its file has {found.st_nlink} names instead of {names}")
