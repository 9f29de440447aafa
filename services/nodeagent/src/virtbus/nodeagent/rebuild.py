"""Provides this host's records to a rebuilt bus, and joins the host to that bus."""

import logging
from collections.abc import Iterable, Iterator

from virtbus.bus.client.ports import Request
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.assignments import Assignments
from virtbus.nodeagent.vm.machine import VmPhase
from virtbus.schemas.bounds import REQUEST_BYTES
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import JoinBus, JoinedBus, KnownRecords, RecordsRead
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, validate

log = logging.getLogger(__name__)

PAGE_BYTES = REQUEST_BYTES
"""The size limit of the records in one answer."""
LEFT = frozenset[VmPhase]({"released", "gone"})


def _page(records: Iterable[VmRecord], limit: int) -> Iterator[VmRecord]:
    """Yield the first records that fit in one answer, at least one and at most `limit`."""
    left_bytes = PAGE_BYTES
    for number, record in enumerate(records):
        left_bytes -= len(encode(record))
        if number == limit or (left_bytes < 0 and number > 0):
            return
        yield record


class Rebuild:
    """Answers `rpc.agent.records` and `rpc.agent.join`."""

    def __init__(self, tools: AgentPorts, vms: Assignments) -> None:
        self._node = tools.settings.node
        self._files = tools.files
        self._vms = vms

    def _nonce_of_bus(self) -> str:
        if not self._vms.listed:
            message = f"node {self._node} has not read this bus yet; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message, after_ms=1000)
        return self._vms.join.nonce

    async def records(self, request: Request) -> KnownRecords:
        """Return a page of this host's records.

        Raises:
            VirtbusError: 503 `recovering`: the bus is not listed yet.
        """
        want = validate(RecordsRead, request.data)
        self._nonce_of_bus()  # raises until the bus is listed
        here = {uid: g.vm.record for uid, g in self._vms.actors.items() if g.vm.phase not in LEFT}
        remaining = sorted(uid for uid in here if uid > want.after)
        page = list(_page((here[uid] for uid in remaining), want.limit))
        removed = {} if want.after else dict(self._files.removed())
        return KnownRecords(
            node=self._node,
            nonce=self._files.nonce(),
            node_spec=self._files.node_spec(),
            records=tuple(page),
            removed=removed,
            more=len(remaining) > len(page),
        )

    async def join(self, request: Request) -> JoinedBus:
        """Join the incarnation of the bus that the request names.

        Raises:
            VirtbusError: 503 `other_bus`: this node sees another incarnation of the bus.
                503 `recovering`: the bus is not listed yet.
        """
        want = validate(JoinBus, request.data)
        if want.nonce != self._nonce_of_bus() and want.nonce != self._files.nonce():
            message = f"node {self._node} does not see that bus; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "other_bus", message, after_ms=1000)
        if want.nonce != self._files.nonce():
            self._files.set_nonce(want.nonce)
            log.warning(
                "the node joined a new incarnation of the bus", extra={"code": "joined_anew"}
            )
        self._vms.relist()
        return JoinedBus(node=self._node, nonce=want.nonce, vms=len(self._vms.actors))
