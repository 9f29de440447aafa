"""netd's step in a create: the VM's network."""

from collections.abc import Mapping

from virtbus.bus.client.record_worker import Ensured
from virtbus.netd.attachments import Attachments
from virtbus.netd.reporter import NetworkReporter
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm import RunStrategy, VmRecord


class NetworkStep:
    """`record_worker.Step`: the network is made once, and later only checked."""

    name = "attach the network"
    span = "virtbus attach network"
    first_retry_s = 0.5
    interrupts = False
    """A start may wait for the taps of the attempt."""

    def __init__(self, attachments: Attachments, reporter: NetworkReporter) -> None:
        self._attachments = attachments
        self._reporter = reporter

    def follows(self, record: VmRecord) -> bool:
        """Return False for a halted VM, which needs no network."""
        return record.spec.run_strategy is not RunStrategy.HALTED

    def forgets(self, uid: str) -> None:
        """Do nothing: a network is removed by request."""

    async def ensure(self, record: VmRecord, logins: Mapping[str, str]) -> Ensured[NetReady]:
        """Attach the network; errors as `Attachments.ensure`."""
        del logins
        before = self._attachments.state_of(record.uid)
        ready = await self._attachments.ensure(record, self._reporter.ready)
        if before is not None and before.phase is NetPhase.READY:
            return Ensured(ready, None)
        addresses = ",".join(address for nic in ready.interfaces for address in nic.addresses)
        return Ensured(ready, {"addresses": addresses})

    def refusal(self, record: VmRecord, error: VirtbusError) -> NetReady:
        """Return the outcome of a failure."""
        return NetReady(
            uid=record.uid,
            epoch=record.epoch,
            generation=record.generation,
            phase=NetPhase.FAILED,
            error=error.body,
        )
