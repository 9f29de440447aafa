"""Reports pools that consist of block devices: sizes and missing devices (ADR 0060)."""

import asyncio
import errno
import os
import stat
from collections.abc import Mapping
from functools import partial

from virtbus.bus.runtime.pool_settings import PROBE_S, BlockPool, PoolSettings
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.pool_servers import Tell
from virtbus.schemas.pool import END_BYTES, MESSAGE_MAX, PoolReport, PoolState


async def report_devices(
    pools: Mapping[str, PoolSettings], tell: Tell, interval_s: float = PROBE_S
) -> None:
    """Report all pools of devices each `interval_s`; return only if the node has no such pool."""
    devices = {name: one for name, one in pools.items() if isinstance(one, BlockPool)}
    while devices:
        found = [await in_thread(partial(measured, *one)) for one in devices.items()]
        tell("devices", found)
        await asyncio.sleep(interval_s)


def measured(name: str, pool: BlockPool) -> PoolReport:
    """Return the state of a pool of devices. Blocks."""
    sizes: dict[str, int] = {}
    missing = []
    for volume, path in sorted(pool.volumes.items()):
        try:
            device = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISBLK(os.fstat(device).st_mode):
                    raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK))
                sizes[volume] = os.lseek(device, 0, os.SEEK_END)
            finally:
                os.close(device)
        except OSError as error:
            missing.append(f"{path} of {volume}: {error.strerror}")
    return PoolReport(
        name=name,
        kind=pool.kind,
        state=PoolState.GONE if missing else PoolState.READY,
        message="; ".join(missing)[:MESSAGE_MAX],
        size_bytes=sum(sizes.values()),
        place_bytes={volume: max(0, size - END_BYTES) for volume, size in sizes.items()},
        volumes=len(pool.volumes),
        assigned=tuple(sorted(pool.volumes)),
    )
