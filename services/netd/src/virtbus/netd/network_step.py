"""Attaches the network of each VM record, as netd's step in the create of a VM."""

from collections.abc import Mapping

from virtbus.bus.client.record_worker import Ensured
from virtbus.netd.attachments import Attachments
from virtbus.netd.reporter import NetworkReporter
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import NetworkState
from virtbus.schemas.node_rpc import NetPhase, NetReady
from virtbus.schemas.vm import RunStrategy, VmRecord


class NetworkStep:
    """Implements `record_worker.Step`: makes a network once, and then only checks it."""

    name = "attach the network"
    span = "virtbus attach network"
    first_retry_s = 0.5
    interrupts = False
    """False: a newer record must not cancel an attempt, because a VM's start may wait for its taps.
    """

    def __init__(self, attachments: Attachments, reporter: NetworkReporter) -> None:
        self._attachments = attachments
        self._reporter = reporter

    def follows(self, record: VmRecord) -> bool:
        """Return False for a halted VM, which needs no network, and for an outdated record.

        A restored bus may have a record with a lower epoch than this host's network, while the
        agent keeps its newer record in force. An attempt with the older record would only report a
        failure at each periodic list.
        """
        known, _ready = self._attachments.look(record.uid)
        outdated = known is not None and record.epoch < known.epoch
        return record.spec.run_strategy is not RunStrategy.HALTED and not outdated

    def forgets(self, uid: str) -> None:
        """Only a `release` request or a record removes a network."""

    async def ensure(self, record: VmRecord, logins: Mapping[str, str]) -> Ensured[NetReady]:
        """Attach the network. Return its ready event, and a new network's addresses.

        If the record says `Released`, remove the network instead. Raises as `Attachments.ensure` or
        `Attachments.release`.
        """
        del logins
        if record.spec.network_state is NetworkState.RELEASED:
            return await self._released(record)
        before = self._attachments.state_of(record.uid)
        ready = await self._attachments.ensure(record, self._reporter.ready)
        if before is not None and before.phase is NetPhase.READY:
            return Ensured(ready, None)
        addresses = ",".join(address for nic in ready.interfaces for address in nic.addresses)
        return Ensured(ready, {"addresses": addresses})

    async def _released(self, record: VmRecord) -> Ensured[NetReady]:
        """Remove the network.

        The ready event has no interfaces. Raises as `Attachments.release`.
        """
        uid, epoch, generation = record.uid, record.epoch, record.generation
        if await self._attachments.release(uid, epoch, unused=True):
            self._reporter.released(uid, epoch)
        ready = NetReady(uid=uid, epoch=epoch, generation=generation, phase=NetPhase.READY)
        return Ensured(ready, None)

    def refusal(self, record: VmRecord, error: VirtbusError) -> NetReady:
        return NetReady(
            uid=record.uid,
            epoch=record.epoch,
            generation=record.generation,
            phase=NetPhase.FAILED,
            error=error.body,
        )
