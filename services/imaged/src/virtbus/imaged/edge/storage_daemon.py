"""Runs one job of QEMU's storage daemon, in the sandbox of qemu-img (ADR 0041)."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from virtbus.imaged.core.archive import printable
from virtbus.imaged.edge import qemu_img

COMMAND = "/usr/bin/qemu-storage-daemon"
_FLUSH = "flush"
_MONITOR = ("--chardev", "stdio,id=monitor", "--monitor", "chardev=monitor,mode=control")


def exists() -> bool:
    """Return True if this node has the daemon."""
    return Path(COMMAND).exists()


async def run(
    files: qemu_img.Files,
    nodes: Sequence[Mapping[str, object]],
    job: tuple[str, Mapping[str, Any]],
    limits: tuple[int, int],
    look: Callable[[], Awaitable[None]],
) -> tuple[qemu_img.Ended, str]:
    """Open block nodes, run a job, and end the daemon; return its end, and the job's error.

    `job` is the command that begins the job, with its arguments. `limits` are as in
    `qemu_img.convert`. `look` is called meanwhile, and may raise to end the daemon. A job with
    `auto-finalize` false ends only after its data is in the files.

    Raises:
        TimeoutError: the daemon ran longer than `WALL_PER_CPU` times its limit of CPU time.
    """
    options = [word for node in nodes for word in ("--blockdev", json.dumps(node))]
    program, pipe = (COMMAND, *options, *_MONITOR), asyncio.subprocess.PIPE
    async with qemu_img.sandboxed(files, limits, program, pipe) as process:
        async with asyncio.timeout(qemu_img.WALL_PER_CPU * limits[1]):
            why = await _run(process, nodes, job, look)
    return await qemu_img.end_of(process), why


async def _run(
    process: asyncio.subprocess.Process,
    nodes: Sequence[Mapping[str, object]],
    job: tuple[str, Mapping[str, Any]],
    look: Callable[[], Awaitable[None]],
) -> str:
    """Let the daemon do the job, then end the daemon; return the job's error, empty if none."""
    await _say(process, "qmp_capabilities", {})
    await _say(process, *job)
    why: str | None = None
    while why is None and (message := await _heard(process, look)):
        why = _outcome(message)
        if message.get("event") == "BLOCK_JOB_PENDING":
            # QEMU flushes a node before it opens the node again; no other command flushes
            await _say(process, "blockdev-reopen", {"options": list(nodes)}, _FLUSH)
        elif message.get("id") == _FLUSH and why is None:
            await _say(process, "job-finalize", {"id": job[1]["job-id"]})
    await _say(process, "quit", {})
    await process.wait()
    return "the daemon ended before its job" if why is None else why


async def _say(
    process: asyncio.subprocess.Process,
    command: str,
    arguments: Mapping[str, Any],
    id_: str = "",
) -> None:
    # uvloop closes the pipe of a killed daemon; a write to the closed pipe would raise RuntimeError
    if process.stdin is not None and not process.stdin.is_closing():
        line = json.dumps({"execute": command, "arguments": arguments, "id": id_})
        with contextlib.suppress(ConnectionError):  # the daemon has ended; its exit code says why
            process.stdin.write(f"{line}\n".encode())
            await process.stdin.drain()


async def _heard(
    process: asyncio.subprocess.Process, look: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Return the next message of the daemon; empty after the daemon's end."""
    if process.stdout is None:
        return {}
    while True:
        await look()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), qemu_img.LOOK_S)
            found = json.loads(line or b"{}")
        except TimeoutError:
            continue
        except ValueError:  # no JSON, or a line beyond the limit
            return {"error": {"desc": "the daemon did not answer in JSON"}}
        return found if isinstance(found, dict) else {}


def _outcome(message: Mapping[str, Any]) -> str | None:
    """Return the error in a message, empty for the success of the job, None for other messages."""
    error, data = message.get("error"), message.get("data")
    if isinstance(error, dict):
        return printable(str(error.get("desc")))
    if message.get("event") != "BLOCK_JOB_COMPLETED" or not isinstance(data, dict):
        return None
    if "error" in data or data.get("offset") != data.get("len"):
        return printable(str(data.get("error", "the job is incomplete")))
    return ""
