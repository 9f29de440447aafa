"""Reads the maximum number of libvirtd's worker threads with `virt-admin`."""

import asyncio
import os
import subprocess

MAX_WORKERS = 20
"""The default of `max_workers` in libvirtd.conf."""
TIMEOUT_S = 3.0
_DAEMONS = ("libvirtd", "virtqemud")


async def read_max_workers(uri: str) -> int:
    """Return the daemon's maximum number of worker threads; MAX_WORKERS if it is unknown."""
    for daemon in _DAEMONS if uri == "qemu:///system" else ():
        workers = await _max_workers(daemon)
        if workers is not None:
            return workers
    return MAX_WORKERS


async def _max_workers(daemon: str) -> int | None:
    try:
        asked = await asyncio.to_thread(
            subprocess.run,
            ("virt-admin", "-c", f"{daemon}:///system", "srv-threadpool-info", daemon),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_max_workers(asked.stdout.decode(errors="replace"))


def parse_max_workers(text: str) -> int | None:
    """Return the number in the line `maxWorkers : 20` of virt-admin's table; None without it."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "maxWorkers" and value.strip().isdigit():
            return int(value)
    return None
