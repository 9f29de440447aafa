"""Probes the servers of the node's pools, each at an interval, and reports the pools (ADR 0060)."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from virtbus.bus.runtime.pool_settings import PROBE_S, NbdPool, PoolSettings, ServerPool
from virtbus.nodeagent.core.away_servers import AwayServers
from virtbus.nodeagent.core.server_answers import FirstWords, first_words, hosts
from virtbus.nodeagent.edge.nbd_sizes import export_sizes
from virtbus.schemas.pool import MESSAGE_MAX, PoolReport, PoolState

SLOW_S, GONE_S = 1.0, 3.0
PLACES_S = 60.0
"""Interval of the questions for sizes, which change rarely."""
_BEST_FIRST = (PoolState.READY, PoolState.SLOW, PoolState.GONE)

Tell = Callable[[str, Iterable[PoolReport]], None]


class PoolServers:
    """The pools whose data is on a server. No probe delays another."""

    def __init__(
        self,
        pools: Mapping[str, PoolSettings],
        tell: Tell,
        away: AwayServers,
        interval_s: float = PROBE_S,
    ) -> None:
        self._pools = {name: one for name, one in pools.items() if isinstance(one, ServerPool)}
        self._tell = tell
        self._away = away
        self._interval_s = interval_s
        self._reports: dict[str, PoolReport] = {}

    async def run(self) -> None:
        """Probe all servers; never returns by itself."""
        async with asyncio.TaskGroup() as group:
            for name, pool in self._pools.items():
                group.create_task(self._follow(name, pool))

    async def _follow(self, name: str, pool: ServerPool) -> None:
        loop, due_s = asyncio.get_running_loop(), 0.0
        places: dict[str, int] = {}
        while True:
            state, message = await probed(pool)
            self._away.set(name, away=state is PoolState.GONE)
            if state is not PoolState.GONE and loop.time() >= due_s:
                places = await place_sizes(pool)
                due_s = loop.time() + PLACES_S
            self._reports[name] = PoolReport(
                name=name,
                kind=pool.kind,
                state=state,
                message=message,
                size_bytes=sum(places.values()),
                place_bytes=places,
                volumes=len(pool.volumes),
                assigned=tuple(sorted(pool.volumes)),
            )
            self._tell("servers", [self._reports[one] for one in sorted(self._reports)])
            await asyncio.sleep(self._interval_s)


async def place_sizes(pool: ServerPool) -> dict[str, int]:
    """Return the sizes of the places that a server tells without a login, by volume."""
    if not isinstance(pool, NbdPool) or pool.tls:
        return {}
    sizes = await export_sizes(pool.host, pool.port, sorted(pool.volumes.values()))
    return {key: sizes[name] for key, name in sorted(pool.volumes.items()) if name in sizes}


async def probed(pool: ServerPool) -> tuple[PoolState, str]:
    """Return the state of a server, and the reason if it is not Ready."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(_probed(pool, host)) for host in hosts(pool)]
    found = [one.result() for one in asked]
    state, message = min(found, key=lambda one: _BEST_FIRST.index(one[0]))
    if state is PoolState.GONE:
        message = "; ".join(why for _, why in found)[:MESSAGE_MAX]
    return state, message


async def _probed(pool: ServerPool, host: str) -> tuple[PoolState, str]:
    words, at = first_words(pool), f"{host}:{pool.port}"
    began_s = asyncio.get_running_loop().time()
    answer, why = await _answer(words, host, pool.port)
    if answer and not words.is_greeting(answer):
        why = f"{at} is no server of kind {pool.kind}; correct pools.toml"
    elif why or (why := words.why_not(answer)):
        why = f"the server {at} {why}"
    if why:
        return PoolState.GONE, why
    if asyncio.get_running_loop().time() - began_s > SLOW_S:
        return PoolState.SLOW, f"the server {at} answers slowly"
    return PoolState.READY, ""


async def _answer(words: FirstWords, host: str, port: int) -> tuple[bytes, str]:
    """Return the first bytes of a server, and why they are not all."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(GONE_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(words.sent)
            return await reader.readexactly(words.answer_bytes), ""
    except TimeoutError:
        return b"", "does not answer; start it, or check the network"
    except asyncio.IncompleteReadError as error:
        return error.partial, "closes the connection; start it again"
    except UnicodeError:  # of a label that is empty or too long
        return b"", "has no valid name; correct pools.toml"
    except OSError as error:
        return b"", f"cannot be reached: {error.strerror or type(error).__name__}; start it"
    finally:
        if writer is not None:
            writer.close()
