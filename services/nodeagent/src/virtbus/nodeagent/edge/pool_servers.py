"""Probes the servers of the node's pools, each at an interval, and reports the pools (ADR 0060)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from virtbus.bus.runtime.pool_settings import PROBE_S, PoolSettings, ServerPool
from virtbus.nodeagent.core.away_servers import AwayServers
from virtbus.nodeagent.core.known_sizes import KnownSizes
from virtbus.nodeagent.core.servers.kinds import server_of
from virtbus.nodeagent.core.servers.port import FirstWords
from virtbus.nodeagent.edge.nbd_sizes import export_sizes
from virtbus.schemas.pool import MESSAGE_MAX, PoolReport, PoolState

SLOW_S, GONE_S = 1.0, 3.0
PLACES_S = 60.0
"""Interval of the questions for the sizes of places. A place is the location of one volume's data
on the server. Sizes change rarely."""
BY_QEMU_S = 15.0, 600.0
"""The first and the longest interval of these questions if QEMU asks them. A question takes 1 s of
CPU time. The interval doubles while a size is unknown. If all sizes are known, the longest is used.
"""
_UNKNOWN = PoolState.GONE, ""
_BEST_FIRST = (PoolState.READY, PoolState.SLOW, PoolState.GONE)

Tell = Callable[[str, Iterable[PoolReport]], None]


Ask = Callable[[str, ServerPool], Awaitable[Mapping[str, int]]]
"""Lets QEMU ask the server of a pool (name, settings) for sizes; returns the sizes by volume."""


class PoolServers:
    """The pools whose data is on a server. A slow server does not delay probes of other servers."""

    def __init__(
        self,
        pools: Mapping[str, PoolSettings],
        tell: Tell,
        away: AwayServers,
        ask: Ask,
        time_ns: Callable[[], int],
        interval_s: float = PROBE_S,
    ) -> None:
        self._pools = {name: one for name, one in pools.items() if isinstance(one, ServerPool)}
        self._tell = tell
        self._away = away
        self._ask = ask
        self._time_ns = time_ns
        self._interval_s = interval_s
        self._states: dict[str, tuple[PoolState, str]] = {}
        self._sizes = {name: KnownSizes() for name in self._pools}

    async def run(self) -> None:
        """Probe all servers; return only if no pool is on a server."""
        async with asyncio.TaskGroup() as group:
            for name, pool in self._pools.items():
                group.create_task(self._follow(name, pool))
                if not server_of(pool).tells_sizes:
                    group.create_task(self._measure(name, pool))

    async def _follow(self, name: str, pool: ServerPool) -> None:
        loop, due_s = asyncio.get_running_loop(), 0.0
        while True:
            self._states[name] = await probed(pool)
            self._away.set(name, away=self._is_away(name))
            if server_of(pool).tells_sizes and not self._is_away(name) and loop.time() >= due_s:
                self._sizes[name].confirm(await place_sizes(pool), self._time_ns())
                due_s = loop.time() + PLACES_S
            self._report()
            await asyncio.sleep(self._interval_s)

    async def _measure(self, name: str, pool: ServerPool) -> None:
        first_s, longest_s = BY_QEMU_S
        delay_s = first_s
        while True:
            if self._is_away(name):
                await asyncio.sleep(self._interval_s)
                continue
            self._sizes[name].confirm(await self._ask(name, pool), self._time_ns())
            self._report()
            is_whole = self._sizes[name].bytes.keys() == pool.volumes.keys()
            await asyncio.sleep(longest_s if is_whole else delay_s)
            delay_s = first_s if is_whole else min(2 * delay_s, longest_s)

    def _is_away(self, name: str) -> bool:
        return self._states.get(name, _UNKNOWN)[0] is PoolState.GONE

    def _report(self) -> None:
        self._tell("servers", [self._reported(name) for name in sorted(self._states)])

    def _reported(self, name: str) -> PoolReport:
        pool, sizes, (state, message) = self._pools[name], self._sizes[name], self._states[name]
        return PoolReport(
            name=name,
            kind=pool.kind,
            state=state,
            message=message,
            size_bytes=sum(sizes.bytes.values()),
            place_bytes=dict(sizes.bytes),
            places_confirmed_ns=sizes.confirmed_ns(away=self._is_away(name)),
            volumes=len(pool.volumes),
            assigned=tuple(sorted(pool.volumes)),
        )


async def place_sizes(pool: ServerPool) -> dict[str, int]:
    """Return the sizes of places that an NBD server reports, by volume."""
    sizes = await export_sizes(pool.host, pool.port, sorted(pool.volumes.values()))
    return {key: sizes[name] for key, name in sorted(pool.volumes.items()) if name in sizes}


async def probed(pool: ServerPool) -> tuple[PoolState, str]:
    """Return the best state among a server's hosts, and the reason if that state is not Ready."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(_probed(pool, host)) for host in server_of(pool).hosts]
    found = [one.result() for one in asked]
    state, message = min(found, key=lambda one: _BEST_FIRST.index(one[0]))
    if state is PoolState.GONE:
        message = "; ".join(why for _, why in found)[:MESSAGE_MAX]
    return state, message


async def _probed(pool: ServerPool, host: str) -> tuple[PoolState, str]:
    words, at = server_of(pool).first_words(), f"{host}:{pool.port}"
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
    """Return the first bytes that a server sends, and the reason if bytes are missing."""
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
    except UnicodeError:  # a label of the host's name is empty or too long
        return b"", "has no valid name; correct pools.toml"
    except OSError as error:
        return b"", f"cannot be reached: {error.strerror or type(error).__name__}; start it"
    finally:
        if writer is not None:
            writer.close()
