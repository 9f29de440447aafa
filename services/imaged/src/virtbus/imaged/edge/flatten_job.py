"""Pulls the data of a disk's layers up into the disk, by QEMU's storage daemon (ADR 0080).

The disk has the same content at each instant. One write at the end changes the disk's header, so a
crash or a cancel before this write leaves a sound disk on its layers. The job waits for a flush
before it changes the header. QEMU by itself would change the header before the disk's tables are in
the file, and a crash would lose the copied data.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge import openat2, qemu_img, storage_daemon
from virtbus.imaged.edge.export_conversion import (
    ExportSource,
    bounds,
    failed,
    failure,
    source_node,
    too_slow,
)
from virtbus.schemas.errors import Code, VirtbusError

BASE = "image"


async def flatten(
    source: ExportSource,
    image: Path | None,
    limits: TransferLimits,
    look: Callable[[], Awaitable[None]],
) -> None:
    """Let the disk of `source` rest on its `image` only; without `image`, on no other file.

    `source.disk` is open for writing. `look` is called meanwhile, and may raise to end the job.

    Raises:
        VirtbusError: 409 `disk_in_use`. 422 `copy_failed`, `sandbox_unavailable`. 503 `disk_full`.
            The errors of `look`.
    """
    if not storage_daemon.exists():
        message = "this node has no qemu-storage-daemon; install qemu-system-common, then repeat"
        raise VirtbusError(Code.UNSUPPORTED, "sandbox_unavailable", message)
    disk = {**source_node(source), "node-name": "disk"}
    stream: dict[str, object] = {"job-id": "flatten", "device": "disk", "auto-finalize": False}
    if image is not None:
        _lowest(disk)["node-name"] = BASE
        stream |= {"base-node": BASE, "backing-file": str(image)}
    first, *more = source.below
    files = qemu_img.Files(first, source.disk, tuple(more))
    job = "block-stream", stream
    try:
        ended, why = await storage_daemon.run(files, (disk,), job, bounds(source, limits), look)
    except TimeoutError:
        raise too_slow(source, limits) from None
    if ended.code:
        raise failure(ended)
    if why:
        raise failed(why)


def _lowest(node: dict[str, object]) -> dict[str, object]:
    while isinstance(below := node.get("backing"), dict):
        node = below
    return node


def open_writable(opened: ExitStack, path: Path) -> int:
    """Open a disk for writing, until `opened` ends; raises 409 `disk_unreadable`."""
    try:
        with openat2.opened_directory(path.parent) as folder:
            descriptor = openat2.open_file(path.name, folder, os.O_RDWR)
    except OSError as error:
        message = f"the disk cannot be written: {error.strerror}; see imaged's log"
        raise VirtbusError(Code.CONFLICT, "disk_unreadable", message) from error
    opened.callback(os.close, descriptor)
    return descriptor
