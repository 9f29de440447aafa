"""Checks a VM's disks: the limits of each bus, and values that exclude each other.

The controllers check requests, and kubebridge checks manifests. A stored spec is read
without these checks, so a stricter rule affects no existing VM.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from virtbus.schemas.disk import (
    BLOCK_MIN,
    RATE_MAX,
    BlockSize,
    CacheMode,
    DetectZeroes,
    Discard,
    Disk,
    DiskBus,
    DiskLimits,
    ErrorPolicy,
    IoMode,
    IoThreads,
    IoThreadsPolicy,
    Rates,
    ReadErrorPolicy,
)
from virtbus.schemas.disk_buses import ABILITIES, BOOTABLE_SATA, MAX_DISKS, Verb
from virtbus.schemas.errors import Detail

DISKS = "spec.domain.devices.disks"
IO_THREADS = "spec.domain.io_threads"
Problem = tuple[str, str]
"""The path of a field, relative to its disk, and the message about the field."""
_UNCACHED = (CacheMode.NONE, CacheMode.DIRECTSYNC)


def disk_problems(disks: Mapping[int, Disk], threads: IoThreads | None = None) -> Iterator[Detail]:
    """Yield the problems of a VM's threads and disks.

    The keys of `disks` are the indices of the disks in the request's list.
    """
    if threads is not None:
        yield from _threads(threads)
    yield from _crowded(disks)
    yield from _twice(disks)
    for index, disk in disks.items():
        for check in _CHECKS:
            for field, message in check(disk):
                yield Detail(path=f"{DISKS}[{index}].{field}", message=message)


def _threads(threads: IoThreads) -> Iterator[Detail]:
    if (threads.count is not None) != (threads.policy is IoThreadsPolicy.POOL):
        message = "is needed for the policy pool, and for no other"
        yield Detail(path=f"{IO_THREADS}.count", message=message)


def _crowded(disks: Mapping[int, Disk]) -> Iterator[Detail]:
    used: Counter[str] = Counter()
    for index, disk in disks.items():
        used[disk.bus] += 1
        most = MAX_DISKS[disk.bus]
        late = disk.bus is DiskBus.SATA and used[disk.bus] > BOOTABLE_SATA
        if late and disk.boot_order is not None:
            message = (
                f"the firmware boots from the first {BOOTABLE_SATA} SATA disks; list it earlier,"
                " or put it on another bus"
            )
            yield Detail(path=f"{DISKS}[{index}].bus", message=message)
        if used[disk.bus] == most + 1:
            message = f"a VM has at most {most} disks on {disk.bus}; put the others on another bus"
            yield Detail(path=f"{DISKS}[{index}].bus", message=message)


def _twice(disks: Mapping[int, Disk]) -> Iterator[Detail]:
    orders: dict[int, str] = {}
    serials: dict[str, str] = {}
    for index, disk in disks.items():
        order, serial = disk.boot_order, disk.guest_serial
        if order is not None and orders.setdefault(order, disk.name) != disk.name:
            message = f"{order} is the boot order of {orders[order]!r}, too; give each its own"
            yield Detail(path=f"{DISKS}[{index}].boot_order", message=message)
        if serials.setdefault(serial, disk.name) != disk.name:
            message = f"{serial!r} is the serial of {serials[serial]!r}, too; give each its own"
            yield Detail(path=f"{DISKS}[{index}].serial", message=message)


def _device(disk: Disk) -> Iterator[Problem]:
    abilities = ABILITIES[disk.bus]
    if disk.device == "cdrom":
        if abilities[Verb.CDROM].refused:
            yield "device", abilities[Verb.CDROM].why
    elif disk.readonly and abilities[Verb.READONLY].refused:
        yield "readonly", abilities[Verb.READONLY].why
    if disk.dedicated_io_thread and disk.bus is not DiskBus.VIRTIO:
        yield "dedicated_io_thread", abilities[Verb.IO_THREAD].why


def is_drive(disk: Disk) -> bool:
    """Return True for a CD-ROM drive whose medium can be changed."""
    return disk.device == "cdrom" and not ABILITIES[disk.bus][Verb.MEDIA_CHANGE].refused


def _tray(disk: Disk) -> Iterator[Problem]:
    if disk.tray is None:
        return
    if disk.device != "cdrom":
        yield "tray", "only a cdrom has a tray"
    elif ABILITIES[disk.bus][Verb.MEDIA_CHANGE].refused:
        yield "tray", ABILITIES[disk.bus][Verb.MEDIA_CHANGE].why


def _host_io(disk: Disk) -> Iterator[Problem]:
    discard = ABILITIES[disk.bus][Verb.DISCARD]
    if disk.io is IoMode.NATIVE and disk.cache not in _UNCACHED:
        yield "io", "native needs cache: none or directsync"
    if disk.discard is Discard.UNMAP and discard.refused:
        yield "discard", discard.why
    if disk.detect_zeroes is DetectZeroes.UNMAP:
        if discard.refused:
            yield "detect_zeroes", discard.why
        elif disk.discard is Discard.IGNORE:
            yield "detect_zeroes", "unmap needs discard: unmap; write on, or leave discard out"


def _errors(disk: Disk) -> Iterator[Problem]:
    ability = ABILITIES[disk.bus][Verb.ERROR_POLICY]
    if not ability.refused:
        return
    if disk.error_policy not in {None, ErrorPolicy.REPORT}:
        yield "error_policy", ability.why
    if disk.read_error_policy not in {None, ReadErrorPolicy.REPORT}:
        yield "read_error_policy", ability.why


def _blocks(disk: Disk) -> Iterator[Problem]:
    size, ability = disk.block_size, ABILITIES[disk.bus][Verb.BLOCK_SIZE]
    if size is None:
        return
    if disk.device == "cdrom":
        yield "block_size", "a CD-ROM has blocks of 2,048 bytes; leave it out"
    elif ability.refused:
        yield "block_size", ability.why
    elif disk.bus is DiskBus.SATA and size.logical_bytes not in {None, BLOCK_MIN}:
        yield "block_size.logical_bytes", ability.why
    yield from _powers(size)


def _powers(size: BlockSize) -> Iterator[Problem]:
    logical, physical = size.logical_bytes, size.physical_bytes
    for field, value in (("logical_bytes", logical), ("physical_bytes", physical)):
        if value is not None and value & (value - 1):
            yield f"block_size.{field}", f"{value} is no power of two"
    if physical is not None and (logical or BLOCK_MIN) > physical:
        yield "block_size.physical_bytes", "must be at least the logical size"


def _limits(disk: Disk) -> Iterator[Problem]:
    limits = disk.limits
    if limits is None:
        return
    ability = ABILITIES[disk.bus][Verb.LIMITS]
    if ability.refused:
        yield "limits", ability.why
    yield from _totals(limits, "limits")
    if limits.burst is not None:
        yield from _totals(limits.burst, "limits.burst")
        yield from _bursts(limits, limits.burst)
    elif limits.burst_s is not None:
        yield "limits.burst_s", "is the length of a burst; give burst, too"


def _totals(rates: Rates, at: str) -> Iterator[Problem]:
    for unit in ("bytes_per_s", "iops"):
        parts = [name for name in (f"read_{unit}", f"write_{unit}") if getattr(rates, name)]
        if getattr(rates, unit) and parts:
            yield f"{at}.{unit}", f"is a total; give either it or {' and '.join(parts)}"


def _bursts(limits: DiskLimits, burst: Rates) -> Iterator[Problem]:
    for name in Rates.model_fields:
        rate, most = getattr(limits, name), getattr(burst, name)
        if most is None:
            continue
        if rate is None:
            yield f"limits.burst.{name}", f"needs limits.{name}, the rate without a burst"
        elif most < rate:
            yield f"limits.burst.{name}", f"must be at least limits.{name}, {rate}"
        if most * (limits.burst_s or 1) > RATE_MAX:
            yield f"limits.burst.{name}", f"times burst_s must be at most {RATE_MAX}"


_CHECKS = (_device, _tray, _host_io, _errors, _blocks, _limits)
