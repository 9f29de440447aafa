"""Renders a disk's properties: `<driver>`, `<iotune>` and `<blockio>` (libvirt: formatdomain)."""

from collections.abc import Mapping, Sequence

from virtbus.nodeagent.core.element import Element, el
from virtbus.schemas.disk import BlockSize, CacheMode, Discard, Disk, DiskLimits, Rates
from virtbus.schemas.disk_buses import ABILITIES, Verb

_TAGS = {
    "bytes_per_s": "total_bytes_sec",
    "read_bytes_per_s": "read_bytes_sec",
    "write_bytes_per_s": "write_bytes_sec",
    "iops": "total_iops_sec",
    "read_iops": "read_iops_sec",
    "write_iops": "write_iops_sec",
}
"""Libvirt's name of each rate."""


def driver_element(
    disk: Disk, image_format: str, thread: int | None, *, stops: bool = False, shared: bool = False
) -> Element:
    """Return `<driver>`. `thread` is the number of the disk's I/O thread.

    `stops` is for a disk on a server that may be away for a while: by default, an error pauses the
    guest. A `shared` disk bypasses the host's cache by default.
    """
    driver = el("driver", name="qemu", type=image_format, discard=_discard(disk))
    reports = ABILITIES[disk.bus][
        Verb.ERROR_POLICY
    ].refused  # QEMU's NVMe device always reports errors to the guest, and lacks this property
    stop = "stop" if stops else None
    chosen = {
        "error_policy": None if reports else disk.error_policy or stop,
        "rerror_policy": None if reports else disk.read_error_policy or stop,
        "cache": disk.cache or (CacheMode.NONE if shared else None),
        "io": disk.io,
        "detect_zeroes": disk.detect_zeroes,
        "iothread": thread,
    }
    for name, value in chosen.items():
        if value is not None:
            driver.set(name, str(value))
    return driver


def _discard(disk: Disk) -> Discard | None:
    if disk.discard is not None:
        return disk.discard
    fixed = disk.readonly or disk.device == "cdrom" or ABILITIES[disk.bus][Verb.DISCARD].refused
    return None if fixed else Discard.UNMAP


def iotune(limits: DiskLimits | None) -> dict[str, int]:
    """Return the limits under libvirt's names."""
    values: dict[str, int] = {}
    if limits is None:
        return values
    burst = limits.burst or Rates()
    for name, tag in _TAGS.items():
        rate, most = getattr(limits, name), getattr(burst, name)
        if rate is not None:
            values[tag] = rate
        if most is not None:
            values |= {f"{tag}_max": most, f"{tag}_max_length": limits.burst_s or 1}
    return values


def iotune_element(limits: DiskLimits | None) -> Element | None:
    """Return `<iotune>`, or None without a limit."""
    values = iotune(limits)
    return el("iotune", *(el(tag, str(value)) for tag, value in values.items())) if values else None


NO_LIMITS = {f"{tag}{end}": 0 for tag in _TAGS.values() for end in ("", "_max", "_max_length")}
"""The values that remove all limits of a disk. An omitted value would stay in force."""


def disk_limits(disks: Sequence[Disk]) -> dict[str, DiskLimits]:
    """Return the existing limits, by disk name."""
    return {disk.name: disk.limits for disk in disks if disk.limits is not None}


def limit_calls(disks: Mapping[str, Disk]) -> dict[str, dict[str, int]]:
    """Return all limits of disks whose bus permits limits, by target. 0 means no limit."""
    return {
        target: NO_LIMITS | iotune(disk.limits)
        for target, disk in disks.items()
        if not ABILITIES[disk.bus][Verb.LIMITS].refused
    }


def shown_limits(figures: Mapping[str, int]) -> dict[str, int]:
    """Return libvirt's non-zero figures under virtbus' names.

    The name of a burst begins with `burst_`.
    """
    shown = {}
    for name, tag in _TAGS.items():
        for ours, theirs in ((name, tag), (f"burst_{name}", f"{tag}_max")):
            if figures.get(theirs):
                shown[ours] = figures[theirs]
        length_s = figures.get(f"{tag}_max_length")
        if length_s and figures.get(f"{tag}_max"):
            shown["burst_s"] = length_s
    return shown


def blockio_element(size: BlockSize | None) -> Element | None:
    """Return `<blockio>`, or None for QEMU's sizes."""
    if size is None or size == BlockSize():
        return None
    # QEMU refuses a logical size above the physical size, whose default is 512
    physical = size.physical_bytes or size.logical_bytes
    element = el("blockio")
    for name, value in (("logical", size.logical_bytes), ("physical", physical)):
        if value is not None:
            element.set(f"{name}_block_size", str(value))
    return element
