"""Measures the pools of kind `local` at intervals, each in a thread of its own (ADR 0060).

A pool that hangs delays no other pool. Its state is Slow, then Gone, until its thread returns.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

from virtbus.bus.runtime.pool_settings import PROBE_S
from virtbus.imaged.edge.disk_threads import in_daemon
from virtbus.imaged.edge.pools import Pools, rounded
from virtbus.schemas.pool import PoolReport, PoolState

log = logging.getLogger(__name__)

SLOW_S = 2.0
GONE_S = 10.0
READ_AGAIN = 75
"""Number of probes after which the sizes of all volumes are read again: five minutes."""


class PoolProbes:
    """The latest reports of the pools that imaged measures."""

    def __init__(
        self, pools: Pools, changed: Callable[[], None], interval_s: float = PROBE_S
    ) -> None:
        self._pools = pools
        self._changed = changed
        self._interval_s = interval_s
        self._reports: dict[str, PoolReport] = {}

    @property
    def reports(self) -> tuple[PoolReport, ...]:
        return tuple(self._reports[name] for name in sorted(self._reports))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._pools.names:
                group.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        for times in itertools.count():
            if times % READ_AGAIN == 0:
                self._pools.read_again(name)
            began_s = loop.time()
            call = in_daemon(f"pool-{name}", partial(self._pools.measure, name))
            while not (await asyncio.wait({call}, timeout=SLOW_S))[0]:
                self._set(self._hanging(name, loop.time() - began_s))
            self._set(call.result())
            await asyncio.sleep(self._interval_s)

    def _hanging(self, name: str, for_s: float) -> PoolReport:
        state = PoolState.SLOW if for_s < GONE_S else PoolState.GONE
        answer = "answers slowly" if state is PoolState.SLOW else "does not answer"
        message = f"it {answer}; check its disk or its server"
        known = self._pools.states.get(name) or self._pools.unmeasured(name)
        return known.model_copy(update={"state": state, "message": message})

    def _set(self, report: PoolReport) -> None:
        before, after = self._reports.get(report.name), rounded(report)
        self._pools.states[report.name] = report
        if after == before:
            return
        self._reports[report.name] = after
        if before is None or before.state is not after.state:
            extra = {"code": "pool_state"}
            why = f": {report.message}" if report.message else ""
            log.info("pool %s is %s%s", report.name, report.state, why, extra=extra)
        self._changed()
