"""Opens files of the node that are disks of VMs, and makes missing files (ADR 0076).

QEMU gets a file's descriptor. A later link or rename therefore cannot exchange the file, and
libvirt does not change its owner.
"""

import os
import stat

from virtbus.nodeagent.edge import virtiofsd
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.volume_ref import HostDisk

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Non-blocking, because the opening of a FIFO would hang."""


def open_disk(root: str, disk: HostDisk, *, readonly: bool) -> int:
    """Return a descriptor of a disk's file, without following links below `root`.

    Raises:
        VirtbusError: 409 `disk_refused`: the path is no plain file, has other names, or cannot be
            opened. Or the file is missing or empty, and the spec has no capacity or a read-only
            disk.
    """
    folder, _, name = disk.path.rpartition("/")
    if len(folder) < len(root):
        raise _refused(disk, "it is the allowed directory itself; name a file below it")
    folders: list[int] = []
    try:
        folders = virtiofsd.opened(root, folder)
        return _opened(disk, name, folders[-1], readonly=readonly)
    except virtiofsd.RefusedError as error:
        raise _refused(disk, str(error)) from error
    except OSError as error:
        raise _refused(disk, f"it cannot be opened: {error.strerror}") from error
    finally:
        for one in folders:
            os.close(one)


def _opened(disk: HostDisk, name: str, folder: int, *, readonly: bool) -> int:
    mode = os.O_RDONLY if readonly else os.O_RDWR
    make = os.O_CREAT if disk.capacity is not None and not readonly else 0
    descriptor = os.open(name, mode | make | _FLAGS, 0o600, dir_fd=folder)
    try:
        _check(disk, os.fstat(descriptor), make=bool(make))
        if not os.fstat(descriptor).st_size:  # new, or an earlier agent died here
            os.ftruncate(descriptor, disk.capacity or 0)
            os.fsync(descriptor)
            os.fsync(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(disk: HostDisk, found: os.stat_result, *, make: bool) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise _refused(disk, "it is no plain file with one name")
    if not found.st_size and not make:
        raise _refused(disk, "it is empty; give a capacity to make it")


def _refused(disk: HostDisk, why: str) -> VirtbusError:
    message = f"the disk {disk.path} of the node is refused: {why}"
    return VirtbusError(Code.CONFLICT, "disk_refused", message)
