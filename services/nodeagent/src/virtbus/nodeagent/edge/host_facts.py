"""What this host is: CPUs, memory, disk, versions."""

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from virtbus.nodeagent.core.ports import HostFacts


def memory_bytes() -> int:
    """The host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_facts(
    state_dir: Path,
    *,
    reserve: Callable[[int], int],
    max_vcpus: int,
    accelerators: tuple[str, ...],
    versions: dict[str, str],
) -> HostFacts:
    """The facts as they are now; only the disk changes.

    `reserve` gives, of the disk's size in bytes, what new VMs leave free.
    """
    disk = shutil.disk_usage(state_dir)
    return HostFacts(
        hostname=platform.node(),
        cpus=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        disk_bytes=disk.total,
        disk_free_bytes=disk.free,
        disk_reserve_bytes=reserve(disk.total),
        max_vcpus=max_vcpus,
        accelerators=accelerators,
        versions={"kernel": platform.release(), **versions},
    )
