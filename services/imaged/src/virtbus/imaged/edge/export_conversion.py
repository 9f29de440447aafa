"""Copies a disk with its image into one file, by qemu-img in the sandbox (ADR 0048, 0053)."""

import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge import qemu_img
from virtbus.imaged.edge.disk_copy import open_disk, used_bytes
from virtbus.imaged.edge.partial_download import disk_full
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import ExportFormat

_DRIVERS = {ExportFormat.QCOW2: "qcow2", ExportFormat.RAW: "raw", ExportFormat.RAW_GZ: "raw"}
"""qemu-img's driver for each format. qemu-img cannot write to a pipe, so gzip is a second step."""
_SLACK_BYTES = 64 * 1024**2
"""Room for the tables of a qcow2 file: more than enough for 64 GiB of data."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """The descriptors of a disk and of its image, if it has one, with their formats."""

    disk: int
    virtual_size_bytes: int
    image: int | None = None
    image_format: str = ""
    disk_format: str = "qcow2"
    layers: tuple[int, ...] = ()
    """The opened layers between the disk and its image, from the top."""
    used_bytes: int = 0
    """The disk space of all files when they were opened: an estimate of the result's size."""

    @property
    def below(self) -> tuple[int, ...]:
        return self.layers if self.image is None else (*self.layers, self.image)


class OpenedSource:
    """The open files of a disk, its layers and its image; leaving the context closes the files.

    Opening blocks on the disk.
    """

    def __init__(
        self,
        disk: Path,
        image: Path | None,
        virtual_size_bytes: int,
        image_format: str,
        disk_format: str = "qcow2",
        layers: tuple[Path, ...] = (),
    ) -> None:
        """Open all files; raises VirtbusError 409 `disk_unreadable`."""
        with ExitStack() as stack:
            opened = open_disk(stack, disk)
            base = None if image is None else open_disk(stack, image)
            between = tuple(open_disk(stack, layer) for layer in layers)
            found = ExportSource(
                opened, virtual_size_bytes, base, image_format, disk_format, between
            )
            used = sum(map(used_bytes, (opened, *found.below)))
            self._source = replace(found, used_bytes=used)
            self._files = stack.pop_all()

    def __enter__(self) -> ExportSource:
        return self._source

    def __exit__(self, *_: object) -> None:
        self._files.close()


def source_node(source: ExportSource) -> dict[str, object]:
    """Return the disk as a block node of QEMU.

    The node names the layers and the image by descriptors. So a guest that took over its QEMU and
    changed its disk's header cannot make imaged read another file.
    """
    below: dict[str, object] | None = None
    if source.image is not None:
        below = {"driver": source.image_format, "file": _file(source.image)}
    for layer in reversed(source.layers):
        below = {"driver": "qcow2", "file": _file(layer), "backing": below}
    disk: dict[str, object] = {"driver": source.disk_format, "file": _file(source.disk)}
    if source.disk_format == "qcow2" or below is not None:
        disk["backing"] = below
    return disk


def _file(descriptor: int) -> dict[str, str]:
    return {"driver": "file", "filename": qemu_img.name_of(descriptor)}


async def convert(
    source: ExportSource,
    target: int,
    format_: ExportFormat,
    limits: TransferLimits,
    look: Callable[[], Awaitable[None]],
    into: tuple[str, ...] = (),
) -> None:
    """Write the disk to `target`. `look` is called meanwhile, and may raise to end the copy.

    `into` are further options of qemu-img about the target.

    Raises:
        VirtbusError: 409 `disk_in_use`. 422 `copy_failed`, `sandbox_unavailable`. 503 `disk_full`.
            The errors of `look`.
    """
    files = qemu_img.Files(source.disk, target, source.below)
    out = ("json:" + json.dumps(source_node(source)), qemu_img.name_of(target))
    arguments = (*into, "-O", _DRIVERS[format_], *out)
    try:
        ended = await qemu_img.convert(files, bounds(source, limits), arguments, look)
    except TimeoutError:
        raise too_slow(source, limits) from None
    if ended.code:
        raise failure(ended)


def bounds(source: ExportSource, limits: TransferLimits) -> tuple[int, int]:
    """Return the bytes that a copy may write, and its seconds of CPU time."""
    cpu_s = int(limits.free_decode_s + source.used_bytes / limits.least_decode_bytes_s) + 1
    return source.virtual_size_bytes + source.virtual_size_bytes // 64 + _SLACK_BYTES, cpu_s


def too_slow(source: ExportSource, limits: TransferLimits) -> VirtbusError:
    """Return 422 `copy_failed` for a copy that took more time than its bounds allow."""
    return failed(f"it took more than {qemu_img.WALL_PER_CPU * bounds(source, limits)[1]} s")


def failure(ended: qemu_img.Ended) -> VirtbusError:
    """Return the error for a program of QEMU that failed to copy a disk."""
    if ended.is_unavailable:
        return VirtbusError(
            Code.UNSUPPORTED,
            "sandbox_unavailable",
            f"this node cannot copy disks: {ended.why}; see 'virtbus doctor'",
        )
    if ended.is_disk_full:
        return disk_full("the node's disk is full")
    if "lock" in ended.stderr:
        message = "a guest uses the disk; stop its VM, then try again"
        return VirtbusError(Code.CONFLICT, "disk_in_use", message)
    if ended.is_over_cpu:
        return failed("it took more CPU time than its size allows, or something killed it")
    return failed(f"QEMU's program ended with {ended.code}, {ended.why}")


def failed(why: str) -> VirtbusError:
    """Return 422 `copy_failed`."""
    message = f"the disk cannot be copied: {why}; check it with 'qemu-img check'"
    return VirtbusError(Code.UNSUPPORTED, "copy_failed", message)
