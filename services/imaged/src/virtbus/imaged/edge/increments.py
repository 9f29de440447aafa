"""Copies what a disk that rests has got since a backup, by its bitmap (ADR 0068).

QEMU's storage daemon reads the bitmap and writes the increment, in the sandbox of qemu-img. It has
the disk open for reading only, so nothing of the disk changes.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from virtbus.imaged.core.archive import printable
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge import qemu_img
from virtbus.imaged.edge.export_conversion import (
    ExportSource,
    bounds,
    failed,
    failure,
    source_node,
    too_slow,
)

COMMAND = "/usr/bin/qemu-storage-daemon"
_MONITOR = ("--chardev", "stdio,id=monitor", "--monitor", "chardev=monitor,mode=control")


def missing() -> str:
    """Return why this node cannot write increments; empty if it can."""
    if Path(COMMAND).exists():
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

    `look` is called meanwhile, and may raise to end it.

    Raises:
        VirtbusError: 409 `disk_in_use`; 422 `copy_failed`, `sandbox_unavailable`; 503 `disk_full`.
    """
    files = qemu_img.Files(source.disk, target, source.below)
    into = {"driver": "qcow2", "file": {"driver": "file", "filename": qemu_img.name_of(target)}}
    nodes = (
        {**source_node(source), "node-name": "source", "read-only": True},
        {**into, "node-name": "target"},
    )
    options = [word for node in nodes for word in ("--blockdev", json.dumps(node))]
    size, program = bounds(source, limits), (COMMAND, *options, *_MONITOR)
    pipe = asyncio.subprocess.PIPE
    async with qemu_img.sandboxed(files, size, program, pipe) as process:
        try:
            async with asyncio.timeout(qemu_img.WALL_PER_CPU * size[1]):
                why = await _run(process, bitmap, look)
        except TimeoutError:
            raise too_slow(source, limits) from None
    ended = await qemu_img.end_of(process)
    if ended.code:
        raise failure(ended)
    if why:
        raise failed(why)


async def _run(
    process: asyncio.subprocess.Process, bitmap: str, look: Callable[[], Awaitable[None]]
) -> str:
    """Let the daemon write the increment, and end it; return its error, empty if it has none."""
    copy = {"job-id": "push", "device": "source", "target": "target", "sync": "bitmap"}
    copy |= {"bitmap": bitmap, "bitmap-mode": "never"}
    await _say(process, "qmp_capabilities")
    await _say(process, "blockdev-backup", copy)
    why: str | None = None
    while why is None and (message := await _heard(process, look)):
        why = _outcome(message)
    await _say(process, "quit")
    await process.wait()
    return "the daemon ended before the copy" if why is None else why


async def _say(
    process: asyncio.subprocess.Process, command: str, arguments: Mapping[str, Any] | None = None
) -> None:
    if process.stdin is not None:
        line = json.dumps({"execute": command, "arguments": arguments or {}})
        with contextlib.suppress(ConnectionError):  # it has ended, and its exit code says why
            process.stdin.write(f"{line}\n".encode())
            await process.stdin.drain()


async def _heard(
    process: asyncio.subprocess.Process, look: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Return the next message of the daemon; empty once it has ended."""
    if process.stdout is None:
        return {}
    while True:
        await look()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), qemu_img.LOOK_S)
            found = json.loads(line or b"{}")
        except TimeoutError:
            continue
        except ValueError:  # also a line without an end
            return {"error": {"desc": "the daemon did not answer in JSON"}}
        return found if isinstance(found, dict) else {}


def _outcome(message: Mapping[str, Any]) -> str | None:
    """Return the error in a message, empty for the success of the job, None for others."""
    error, data = message.get("error"), message.get("data")
    if isinstance(error, dict):
        return printable(str(error.get("desc")))
    if message.get("event") != "BLOCK_JOB_COMPLETED" or not isinstance(data, dict):
        return None
    if "error" in data or data.get("offset") != data.get("len"):
        return printable(str(data.get("error", "the copy is incomplete")))
    return ""
