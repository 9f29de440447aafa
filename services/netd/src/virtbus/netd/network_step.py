"""netd's step in a create: the VM's network."""

import asyncio
from collections.abc import Mapping

from virtbus.netd.attachments import Attachments
from virtbus.netd.reporter import NetworkReporter
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm import RunStrategy, VmRecord


class NetworkStep:
    """`record_worker.Step`: the network is made once, and later only checked."""

    name = "attach the network"
    span = "virtbus attach network"
    service = "netd"
    first_retry_s = 0.5
    interrupts = False
    """A start may wait for the taps of the attempt."""

    def __init__(self, attachments: Attachments, reporter: NetworkReporter) -> None:
        self._attachments = attachments
        self._reporter = reporter
        self.failed = reporter.failed
        self.publish = reporter.ready

    def follows(self, record: VmRecord) -> bool:
        """Return False for a halted VM, which needs no network."""
        return record.spec.run_strategy is not RunStrategy.HALTED

    def forgets(self, uid: str) -> None:
        """Do nothing: a network is removed by request."""

    async def ensure(self, record: VmRecord, logins: Mapping[str, str]) -> NetReady:
        """Attach the network; errors as `Attachments.ensure`."""
        del logins
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        before = self._attachments.state_of(record.uid)
        ready = await self._attachments.ensure(record, self._reporter.ready)
        if before is None or before.phase is not NetPhase.READY:
            self._reporter.attached(record, ready, (loop.time() - began_s) * 1000)
        return ready

    def refusal(self, record: VmRecord, error: VirtbusError) -> NetReady:
        """Return the outcome of a failure."""
        return NetReady(
            uid=record.uid,
            epoch=record.epoch,
            generation=record.generation,
            phase=NetPhase.FAILED,
            error=error.body,
        )
