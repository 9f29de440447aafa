"""Reads facts of this host: CPUs, memory, disk, versions."""

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from virtbus.nodeagent.core.ports import HostFacts


def host_facts(
    state_dir: Path,
    *,
    reserve: Callable[[int], int],
    max_vcpus: int,
    accelerators: tuple[str, ...],
    versions: dict[str, str],
) -> HostFacts:
    """Return the current facts. Only the disk's facts change between calls.

    `reserve` returns the bytes that must stay free on a disk of the given size in bytes.
    """
    disk = shutil.disk_usage(state_dir)
    return HostFacts(
        hostname=platform.node(),
        cpus=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_bytes=disk.total,
        disk_free_bytes=disk.free,
        disk_reserve_bytes=reserve(disk.total),
        max_vcpus=max_vcpus,
        accelerators=accelerators,
        versions={"kernel": platform.release(), **versions},
    )
