"""Writes backup increments of VMs that are off: the clusters in their disks' bitmaps (ADR 0068).

QEMU's storage daemon reads the bitmap and writes the increment, in the sandbox of qemu-img. The
daemon has the disk open for reading only, so the disk does not change.
"""

from collections.abc import Awaitable, Callable

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge import qemu_img, storage_daemon
from virtbus.imaged.edge.export_conversion import (
    ExportSource,
    bounds,
    failed,
    failure,
    source_node,
    too_slow,
)


def missing() -> str:
    """Return why this node cannot write increments; empty if it can."""
    if storage_daemon.exists():
        return ""
    return "the VM was off, and its node has no qemu-storage-daemon"


async def push(
    source: ExportSource,
    target: int,
    bitmap: str,
    limits: TransferLimits,
    look: Callable[[], Awaitable[None]],
) -> None:
    """Write the clusters of the disk that are in the bitmap to `target`, an empty qcow2 disk.

    `look` is called meanwhile, and may raise to end the copy.

    Raises:
        VirtbusError: 409 `disk_in_use`. 422 `copy_failed`, `sandbox_unavailable`. 503 `disk_full`.
            The errors of `look`.
    """
    files = qemu_img.Files(source.disk, target, source.below)
    into = {"driver": "qcow2", "file": {"driver": "file", "filename": qemu_img.name_of(target)}}
    nodes = (
        {**source_node(source), "node-name": "source", "read-only": True},
        {**into, "node-name": "target"},
    )
    copy = {"job-id": "push", "device": "source", "target": "target", "sync": "bitmap"}
    copy |= {"bitmap": bitmap, "bitmap-mode": "never"}
    job = "blockdev-backup", copy
    try:
        ended, why = await storage_daemon.run(files, nodes, job, bounds(source, limits), look)
    except TimeoutError:
        raise too_slow(source, limits) from None
    if ended.code:
        raise failure(ended)
    if why:
        raise failed(why)
