"""A VM's disk devices, as the guest sees them."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from string import ascii_lowercase
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from virtbus.schemas.ids import Id
from virtbus.schemas.model import StrictModel
from virtbus.schemas.quantity import Bytes, Count

BOOT_ORDER_MAX = 2**31 - 1
"""QEMU stores the boot order in an int32."""
BLOCK_MIN, LOGICAL_BLOCK_MAX, PHYSICAL_BLOCK_MAX = 512, 4096, 2 * 1024**2
"""Bounds of the block sizes, in bytes. Linux cannot read a disk whose logical blocks are larger
than a memory page."""
RATE_MAX = 10**15
"""QEMU's largest rate. QEMU has the same limit for the product of a burst's rate and length."""
IO_THREADS_MAX = 64
SERIAL_MAX, _START, _DIGITS = 20, 11, 8
"""Characters of a serial, and of the two parts of a shortened name. virtio, sata and nvme cut a
longer serial without an error."""
DISK_MIN, DISK_MAX = 1024**2, 64 * 1024**4
DISKS_MAX = 256
"""The most disks, and the most volumes, of one VM, as in KubeVirt."""


class DiskBus(StrEnum):
    """The device type by which the guest sees a disk."""

    VIRTIO = "virtio"
    SATA = "sata"
    SCSI = "scsi"
    NVME = "nvme"
    USB = "usb"


class ErrorPolicy(StrEnum):
    """QEMU's reaction to an I/O error on the host (libvirt: formatdomain, error_policy)."""

    STOP = "stop"
    """The guest pauses."""
    IGNORE = "ignore"
    """The guest gets no error."""
    REPORT = "report"
    """The guest sees the error."""
    ENOSPACE = "enospace"
    """The guest pauses if the host's disk is full, and sees every other error."""


class ReadErrorPolicy(StrEnum):
    """QEMU's reaction to a failed read; `error_policy` is the reaction to a failed write."""

    STOP = "stop"
    IGNORE = "ignore"
    REPORT = "report"


class CacheMode(StrEnum):
    """The host's cache of a disk (libvirt: formatdomain, cache)."""

    NONE = "none"
    """No page cache of the host; the guest can flush."""
    WRITEBACK = "writeback"
    """The host's page cache; the guest can flush."""
    WRITETHROUGH = "writethrough"
    """The host's page cache; each write is flushed."""
    DIRECTSYNC = "directsync"
    """No page cache of the host; each write is flushed."""
    UNSAFE = "unsafe"
    """Flushes are ignored: a crash of the host destroys the disk."""


UNBUFFERED = frozenset({None, CacheMode.NONE, CacheMode.DIRECTSYNC})
"""The values of `cache` that the disk of a shared volume may have. None means the mode `none`."""


class IoMode(StrEnum):
    """The host's interface for reads and writes."""

    NATIVE = "native"
    """Linux' AIO, which needs the cache mode none or directsync."""
    THREADS = "threads"
    IO_URING = "io_uring"


class Discard(StrEnum):
    """The effect of a guest's discard."""

    UNMAP = "unmap"
    """The disk's file shrinks."""
    IGNORE = "ignore"


class DetectZeroes(StrEnum):
    """The treatment of written zeroes."""

    OFF = "off"
    ON = "on"
    """Zeroes are stored as zero clusters."""
    UNMAP = "unmap"
    """Zeroes are discarded."""


class Tray(StrEnum):
    """The desired position of a CD-ROM drive's tray."""

    CLOSED = "closed"
    """The medium is in the drive."""
    OPEN = "open"
    """The drive is empty, once the guest has unlocked its tray."""
    FORCED_OPEN = "forced-open"
    """The drive is empty, also if the guest locks its tray."""


class BlockSize(StrictModel):
    """The block sizes that the guest sees, powers of two.

    The default of `logical_bytes` is 512. The default of `physical_bytes` is the logical size.
    """

    logical_bytes: Bytes | None = Field(None, ge=BLOCK_MIN, le=LOGICAL_BLOCK_MAX)
    physical_bytes: Bytes | None = Field(None, ge=BLOCK_MIN, le=PHYSICAL_BLOCK_MAX)


class Rates(StrictModel):
    """Rates of a disk. A total rate cannot be combined with separate rates of reads and writes."""

    bytes_per_s: Bytes | None = Field(None, ge=1, le=RATE_MAX)
    read_bytes_per_s: Bytes | None = Field(None, ge=1, le=RATE_MAX)
    write_bytes_per_s: Bytes | None = Field(None, ge=1, le=RATE_MAX)
    iops: Count | None = Field(None, ge=1, le=RATE_MAX)
    read_iops: Count | None = Field(None, ge=1, le=RATE_MAX)
    write_iops: Count | None = Field(None, ge=1, le=RATE_MAX)


class DiskLimits(Rates):
    """The rates of a disk. Only a burst may exceed them."""

    burst: Rates | None = None
    """Higher rates after a quiet time. Each rate needs a value in the same field of `limits`."""
    burst_s: Count | None = Field(None, ge=1, le=86_400)
    """The length of a burst. None means one second."""


class IoThreadsPolicy(StrEnum):
    """The number of threads that the disks without a thread of their own share."""

    SHARED = "shared"
    """One thread."""
    AUTO = "auto"
    """One thread for each of these disks, but at most two threads for each vCPU."""
    POOL = "pool"
    """`count` threads. The disks are assigned to the threads in turn."""


class IoThreads(StrictModel):
    """Threads of QEMU that serve the virtio disks and the SCSI controller.

    Without them, QEMU's main loop serves these devices.
    """

    policy: IoThreadsPolicy
    count: Count | None = Field(None, ge=1, le=IO_THREADS_MAX)


class Disk(StrictModel):
    """A disk device; its content is the volume of the same name. A CD-ROM drive may be empty."""

    name: Id
    bus: DiskBus = DiskBus.VIRTIO
    device: Literal["disk", "cdrom"] = "disk"
    readonly: bool = False
    boot_order: Count | None = Field(None, ge=1, le=BOOT_ORDER_MAX)
    serial: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,20}$")] | None = None
    """None means the disk's name. A long name is cut, and a part of its SHA-256 is appended."""
    error_policy: ErrorPolicy | None = None
    """None means `enospace`, or `stop` for a disk on a server."""
    read_error_policy: ReadErrorPolicy | None = None
    """None means the same as `error_policy`, but `report` instead of `enospace`."""
    cache: CacheMode | None = None
    """None means `writeback`, or the mode `none` for a shared volume."""
    io: IoMode | None = None
    """None means `threads`."""
    discard: Discard | None = None
    """None means `unmap`, on each bus that can discard."""
    detect_zeroes: DetectZeroes | None = None
    """None means `off`."""
    block_size: BlockSize | None = None
    dedicated_io_thread: bool | None = None
    """If True, the disk has a thread of its own. Other disks share the threads of `IoThreads`."""
    limits: DiskLimits | None = None
    tray: Tray | None = None
    """None means `closed`."""

    @property
    def is_open(self) -> bool:
        """Return True for a drive whose medium should be ejected."""
        return self.tray not in {None, Tray.CLOSED}

    @property
    def guest_serial(self) -> str:
        """Return the serial that the guest sees: the spec's, or a serial made from the name."""
        return self.serial if self.serial is not None else serial_of(self.name)


def serial_of(name: str) -> str:
    """Return the serial of a disk whose spec has none: the disk's name, or a short form of it."""
    if len(name) <= SERIAL_MAX:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()
    return f"{name[:_START]}-{digest[:_DIGITS]}"


def target_names(disks: Sequence[Disk]) -> Iterator[str]:
    """Yield the name that each disk has in a Linux guest that finds the disks in this order."""
    used: Counter[str] = Counter()
    for disk in disks:
        prefix = _PREFIXES.get(disk.bus, "sd")
        number, used[prefix] = used[prefix], used[prefix] + 1
        yield f"nvme{number}n1" if prefix == "nvme" else prefix + letters(number)


_PREFIXES = {DiskBus.VIRTIO: "vd", DiskBus.NVME: "nvme"}


def letters(number: int) -> str:
    """Return `a` for 0, `z` for 25, `aa` for 26, and so on."""
    rest, last = divmod(number, len(ascii_lowercase))
    return (letters(rest - 1) if rest else "") + ascii_lowercase[last]
