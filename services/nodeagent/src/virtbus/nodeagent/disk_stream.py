"""Connects readers to the NBD servers of guests, as streams (ADR 0023, ADR 0079)."""

from virtbus.bus.client.owners import check_owner
from virtbus.bus.client.ports import Endpoint, Request
from virtbus.bus.client.streams import accepting
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.operation_runner import OperationRunner
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import DisksRead
from virtbus.schemas.wire import valid_uid, validate

READERS_AT_ONCE = 64
SERVER_ENDED = "QEMU closed the connection"


class DiskStreams:
    """The endpoint of readers. A stalled reader occupies only its own slot."""

    def __init__(self, tools: AgentPorts, operations: OperationRunner) -> None:
        self._tools = tools
        self._operations = operations

    def endpoint(self) -> Endpoint:
        """Requests beyond the limit get 429 at once."""
        subject = subjects.rpc(self._tools.settings.node, "agent", "nbd")
        return Endpoint("agent-nbd", subject, self._read, limit=READERS_AT_ONCE, backlog=0)

    async def _read(self, request: Request) -> None:
        want = validate(DisksRead, request.data)
        op = self._operations.of_id(valid_uid(want.uid))
        if op is None or op.kind != "serve":
            message = f"this node has no reading {want.uid}; see `virtbus operation list`"
            raise VirtbusError(Code.NOT_FOUND, "reading_not_here", message)
        check_owner(request.account, op.owner)
        async with (
            self._tools.reads.connected(op.uid, op.id) as carry,
            accepting(self._tools.bus, request, want) as stream,
        ):
            await carry(stream)
            stream.end(SERVER_ENDED)
