"""What this host is: CPUs, memory, disk, versions."""

import os
import platform
import shutil

from virtbus.nodeagent.core.ports import HostFacts
from virtbus.nodeagent.settings import Settings


def memory_bytes() -> int:
    """The host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_facts(
    settings: Settings, *, max_vcpus: int, accelerators: tuple[str, ...], versions: dict[str, str]
) -> HostFacts:
    """The facts as they are now; only the disk changes."""
    disk = shutil.disk_usage(settings.state_dir)
    reserve = max(settings.min_free_bytes, int(disk.total * settings.min_free_ratio))
    return HostFacts(
        hostname=platform.node(),
        cpus=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        disk_free_bytes=disk.free,
        disk_reserve_bytes=0 if settings.simulate else reserve,
        max_vcpus=max_vcpus,
        accelerators=accelerators,
        versions={"kernel": platform.release(), **versions},
    )
