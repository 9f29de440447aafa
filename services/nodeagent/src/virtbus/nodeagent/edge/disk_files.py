"""Checks a VM's disk files, and pins each file under a name that only the agent can change.

imaged owns `disks/` and `images/`. A hostile imaged could replace a file after the check, before
libvirt, as root, opens its path and changes its owner. Each checked disk therefore gets a hard link
in the VM's own folder, which only the agent can write, and libvirt gets the link's path. Images and
layers need no link, because libvirt does not change their owner.
"""

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from virtbus.bus.runtime.image_locks import locked
from virtbus.bus.runtime.pool_settings import PoolSettings
from virtbus.nodeagent.core.disk_sources import (
    DATA,
    DISKS,
    HEAD_BYTES,
    IMAGES,
    SHARED_SUFFIX,
    DiskSource,
    below,
    check_backing,
    check_disk,
    check_image,
    disk_name,
    disk_sources,
    refused,
    volume_place,
)
from virtbus.nodeagent.edge import layer_files
from virtbus.nodeagent.edge.allowed_devices import allowed_device, open_exclusively
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.disk_pins import (
    BACKUP_PIN,
    LAYER_PIN,
    PINNED,
    disk_of,
    disk_pins,
    drop_pins,
    is_file,
    same_file,
)
from virtbus.nodeagent.edge.lost_guests import qemus
from virtbus.schemas.ids import is_uid
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.layer import LAYERS, STAGED, layer_name
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DIRECTORY = _ROOT | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Non-blocking, so that opening a FIFO cannot hang."""
BACKUPS = "backups"
"""`<state_dir>/disks/backups/<id>/`: the folder in which imaged stages files of backups."""
_READABLE = 0o444
RECOUNTS = 5


class HostDiskFiles:
    """The `DiskFiles` port."""

    def __init__(
        self,
        state_dir: Path,
        pools: Mapping[str, PoolSettings] | None = None,
        devices_allowed: Sequence[str] = (),
    ) -> None:
        self._state = state_dir
        self._pools = pools or {}
        self._devices_allowed = devices_allowed

    async def sources(
        self, record: VmRecord, made: Mapping[str, MadeDisk], *, running: bool = False
    ) -> dict[str, DiskSource]:
        """Check all disks of the record, and return their sources by volume name.

        A file's path is the agent's hard link, or imaged's own path if `disks/` is on another file
        system. Keep links to files that a `running` guest's QEMU uses.

        Raises:
            VirtbusError: 409 `disk_refused`: a file cannot be opened, is not regular, has other
                names, or names another file in its header; or a device is forbidden or unusable.
                Also the errors of `disk_sources`.
        """
        wanted = disk_sources(self._state, record, made, self._pools)

        def judge() -> dict[str, DiskSource]:
            drop_pins(self._state, record, running=running)
            return {name: self._judged(record.uid, name, one) for name, one in wanted.items()}

        return await in_thread(judge)

    # --- new files of a running guest -----------------------------------------------------------
    def layer_pin(self, uid: str, volume: str, snapshot_uid: str) -> str:
        name = f"{LAYER_PIN}{volume}.{disk_name(snapshot_uid)}"
        return str(self._state / "vms" / uid / name)

    async def pin_layer(self, uid: str, volume: str, disk: SnapshotDisk, snapshot_uid: str) -> None:
        """Check a disk's new file, and link it at `layer_pin`. Raises 409 `disk_refused`."""
        layer = self._state / DISKS / LAYERS / layer_name(snapshot_uid, disk.name)
        path = Path(self.layer_pin(uid, volume, snapshot_uid))

        def pin() -> None:
            place = volume_place(disk.ref) if disk.ref else (uid, disk_name(volume))
            *folders, name = place
            try:
                with opened_beneath(
                    self._state / DISKS, tuple(folders), STAGED + name
                ) as descriptor:
                    head = os.pread(descriptor, HEAD_BYTES, 0)
                    check_backing(volume, head, (str(layer), str(ImageFormat.QCOW2)))
                    if same_file(path, Path(f"/proc/self/fd/{descriptor}")):
                        _check_file(volume, descriptor, names=2)
                        return
                    _check_file(volume, descriptor, names=1)
                    path.unlink(missing_ok=True)
                    pinned = self._link(descriptor, path)
            except OSError as error:
                raise refused(volume, f"its new file cannot be opened: {error.strerror}") from error
            if not pinned:
                raise refused(volume, "its folder is on another file system than the agent's")

        await in_thread(pin)

    async def unpin(self, pin: str) -> None:
        await in_thread(lambda: Path(pin).unlink(missing_ok=True))

    # --- files of backups -----------------------------------------------------------------------
    async def pin_backup(self, uid: str, disk: str, backup: str) -> str:
        """Check imaged's staged file for a disk's backup, and return the agent's path of that file.

        Raises:
            VirtbusError: 409 `disk_refused`: the file cannot be opened, is no qcow2 file, has a
                backing file or another name, or is on another file system.
        """
        name = disk_name(disk)
        path = self._state / "vms" / uid / f"{BACKUP_PIN}{backup}.{name}"

        def pin() -> str:
            try:
                with opened_beneath(self._state / DISKS, (BACKUPS, backup), name) as descriptor:
                    check_backing(disk, os.pread(descriptor, HEAD_BYTES, 0), ("", ""))
                    for old in path.parent.glob(f"{BACKUP_PIN}*.{name}"):
                        old.unlink(missing_ok=True)
                    _check_file(disk, descriptor, names=1)
                    pinned = self._link(descriptor, path)
            except OSError as error:
                raise refused(disk, f"its backup cannot be opened: {error.strerror}") from error
            if not pinned:
                raise refused(disk, "its folder is on another file system than the agent's")
            return pinned

        return await in_thread(pin)

    async def unpin_backup(self, uid: str, backup: str) -> None:
        """Let imaged read a backup's files, which QEMU's user owns, and remove the agent's pins."""
        folder = self._state / "vms" / uid

        def unpin() -> None:
            for pin in folder.glob(f"{BACKUP_PIN}{backup}.*"):
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(pin, _FILE)
                    try:
                        os.fchmod(descriptor, _READABLE)
                    finally:
                        os.close(descriptor)
                pin.unlink(missing_ok=True)

        await in_thread(unpin)

    async def backup_pins(self) -> set[tuple[str, str]]:
        names = (self._state / "vms").glob
        found = await in_thread(lambda: list(names(f"*/{BACKUP_PIN}*.*")))
        pins = {(path.parent.name, disk_of(path, BACKUP_PIN)) for path in found}
        return {pin for pin in pins if all(map(is_uid, pin))}

    async def protect_layers(self) -> bool:
        return await in_thread(lambda: layer_files.protect(self._state / DISKS / LAYERS))

    async def remove_layers(self, names: Sequence[str]) -> None:
        await in_thread(lambda: layer_files.remove(self._state / DISKS / LAYERS, names))

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        def ask() -> bool:
            try:
                *folders, name = volume_place(ref)
                with opened_beneath(self._state / DISKS, tuple(folders), name) as descriptor:
                    if not ref.shared:
                        return locked(descriptor)
                    qemu = qemus().get(uid)
                    return qemu is not None and qemu.has_open(os.fstat(descriptor))
            except FileNotFoundError:
                return False

        return await in_thread(ask)

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        kept = {source.path for source in sources.values()}

        def drop() -> None:
            for path in (self._state / "vms" / uid).glob(f"{PINNED}*.*.qcow2"):
                if str(path) not in kept:
                    path.unlink(missing_ok=True)

        await in_thread(drop)

    def _judged(self, uid: str, volume: str, source: DiskSource) -> DiskSource:
        if source.device:
            return self._device(volume, source)
        if not source.is_file:
            return source
        try:
            if source.backing_path and source.backing_format is not None:
                image = Path(source.backing_path).name
                with opened_beneath(self._state / IMAGES, (DATA,), image) as descriptor:
                    _check_file(volume, descriptor, names=1)
                    head = os.pread(descriptor, HEAD_BYTES, 0)
                    check_image(volume, head, source.backing_format)
            for depth, layer in enumerate(source.layers, start=1):
                name = Path(layer).name
                with opened_beneath(self._state / DISKS, (LAYERS,), name) as descriptor:
                    _check_regular(volume, descriptor)
                    head = os.pread(descriptor, HEAD_BYTES, 0)
                    check_backing(volume, head, below(source, depth))
            *folders, name = source.place
            with opened_beneath(self._state / DISKS, tuple(folders), name) as descriptor:
                check_disk(volume, os.pread(descriptor, HEAD_BYTES, 0), source)
                path = self._pinned(uid, volume, source, descriptor)
        except OSError as error:
            raise refused(volume, f"it cannot be opened: {error.strerror}") from error
        return dataclasses.replace(source, path=path or source.path)

    def _device(self, volume: str, source: DiskSource) -> DiskSource:
        """Return the source of a node's device, with its size.

        Refuse a device that the host uses, for example for a mounted file system.
        """
        try:
            path = allowed_device(source.path, self._devices_allowed)
        except ValueError as error:
            raise refused(volume, str(error)) from None
        try:
            descriptor = open_exclusively(path)
        except OSError as error:
            raise refused(volume, f"{path} cannot be opened: {error.strerror}") from error
        with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)) as device:
            if not stat.S_ISBLK(os.fstat(device.fileno()).st_mode):
                raise refused(volume, f"{path} is no block device")
            size_bytes = device.seek(0, os.SEEK_END) - source.reserved_bytes
        if size_bytes <= 0:
            raise refused(volume, f"{path} has no medium")
        return dataclasses.replace(source, path=path, device_bytes=size_bytes)

    def _pinned(self, uid: str, volume: str, source: DiskSource, descriptor: int) -> str:
        """Return the path of the agent's hard link to a disk's open file.

        Return an empty string if `disks/` is on another file system, where no hard link is
        possible.
        """
        path = self._state / "vms" / uid / f"{PINNED}{source.pin}"
        found = os.fstat(descriptor)
        if source.shared:
            self._check_shared(volume, descriptor)
            known = [path]
        else:
            pins = disk_pins(path.parent)
            known = [path, *(one for one, name, layer in pins if layer and name == volume)]
        ours = [one for one in known if is_file(one, found)]
        if not source.shared:
            _check_file(volume, descriptor, names=2 if ours else 1)
        if ours:
            return str(ours[0])
        path.unlink(missing_ok=True)
        return self._link(descriptor, path)

    def _check_shared(self, volume: str, descriptor: int) -> None:
        """Raise `disk_refused` if a shared file has other names than its own and its VMs' pins.

        Count up to five times, because another VM may come or go during the count.
        """
        found, names = _check_regular(volume, descriptor), 0
        for _ in range(RECOUNTS):
            pins = (self._state / "vms").glob(f"*/{PINNED}*{SHARED_SUFFIX}")
            names = 1 + sum(is_file(pin, found) for pin in pins)
            if os.fstat(descriptor).st_nlink == names:
                return
        _check_file(volume, descriptor, names=names)

    def _link(self, descriptor: int, path: Path) -> str:
        """Link an open file at `path`. Return the path; empty if on another file system."""
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


@contextlib.contextmanager
def opened_beneath(root: Path, folders: tuple[str, ...], name: str) -> Iterator[int]:
    """Open the file `name` below `root`; `root` itself may be a symlink.

    Raises:
        OSError: the file cannot be opened; ELOOP or ENOTDIR for a symlink in the path.
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
    """Raise `disk_refused` if the file is not regular, or its hard links are not `names` in number.

    With more links, the file could be a foreign file.
    """
    found = _check_regular(volume, descriptor)
    if found.st_nlink != names:
        raise refused(volume, f"its file has {found.st_nlink} names instead of {names}")


def _check_regular(volume: str, descriptor: int) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise refused(volume, "it is no regular file")
    return found
