"""Probes the servers of the node's pools, each at an interval, and reports the pools (ADR 0060)."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from virtbus.bus.runtime.pool_settings import PROBE_S, NbdPool, PoolSettings
from virtbus.schemas.pool import PoolReport, PoolState

SLOW_S, GONE_S = 1.0, 3.0
_GREETING = b"NBDMAGICIHAVEOPT"
"""The first bytes of a server with the protocol's newer handshake, which named exports need."""

Tell = Callable[[str, Iterable[PoolReport]], None]


class PoolServers:
    """The pools whose data is on a server. No probe delays another."""

    def __init__(
        self, pools: Mapping[str, PoolSettings], tell: Tell, interval_s: float = PROBE_S
    ) -> None:
        self._pools = {name: one for name, one in pools.items() if isinstance(one, NbdPool)}
        self._tell = tell
        self._interval_s = interval_s
        self._reports: dict[str, PoolReport] = {}

    async def run(self) -> None:
        """Probe all servers; never returns by itself."""
        async with asyncio.TaskGroup() as group:
            for name, pool in self._pools.items():
                group.create_task(self._follow(name, pool))

    async def _follow(self, name: str, pool: NbdPool) -> None:
        while True:
            state, message = await probed(pool)
            self._reports[name] = PoolReport(
                name=name,
                kind=pool.kind,
                state=state,
                message=message,
                volumes=len(pool.volumes),
                assigned=tuple(sorted(pool.volumes)),
            )
            self._tell("servers", [self._reports[one] for one in sorted(self._reports)])
            await asyncio.sleep(self._interval_s)


async def probed(pool: NbdPool) -> tuple[PoolState, str]:
    """Return the state of a server, and the reason if it is not Ready."""
    at = f"{pool.host}:{pool.port}"
    began_s = asyncio.get_running_loop().time()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(GONE_S):
            reader, writer = await asyncio.open_connection(pool.host, pool.port)
            greeting = await reader.readexactly(len(_GREETING))
    except TimeoutError:
        return PoolState.GONE, f"the server {at} does not answer; start it, or check the network"
    except (OSError, asyncio.IncompleteReadError) as error:
        why = getattr(error, "strerror", None) or "it closes the connection"
        return PoolState.GONE, f"the server {at} cannot be reached: {why}; start it"[:300]
    finally:
        if writer is not None:
            writer.close()
    if greeting != _GREETING:
        return PoolState.GONE, f"{at} is no NBD server; correct pools.toml"
    if asyncio.get_running_loop().time() - began_s > SLOW_S:
        return PoolState.SLOW, f"the server {at} answers slowly"
    return PoolState.READY, ""
