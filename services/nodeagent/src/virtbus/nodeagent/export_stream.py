"""Sends the file of an export to a client, as a stream (ADR 0023, ADR 0048)."""

from functools import partial
from pathlib import Path

from virtbus.bus.client.owners import check_owner
from virtbus.bus.client.ports import Bus, Endpoint, Request
from virtbus.bus.client.streams import ByteStream, accepting
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.export_file import ExportFile, open_export
from virtbus.nodeagent.operation_runner import OperationRunner, unknown_export
from virtbus.schemas import subjects
from virtbus.schemas.streams import ExportRead
from virtbus.schemas.wire import valid_uid, validate

READERS_AT_ONCE = 16
END_OF_FILE = "end of file"


class ExportStreams:
    """The endpoint of downloads. A stalled reader occupies only its own slot."""

    def __init__(self, bus: Bus, node: str, state_dir: Path, operations: OperationRunner) -> None:
        self._bus = bus
        self._node = node
        self._state_dir = state_dir
        self._operations = operations

    def endpoint(self) -> Endpoint:
        """Return the endpoint, which answers requests above its limit with 429 at once."""
        subject = subjects.rpc(self._node, "agent", "export")
        return Endpoint("agent-export", subject, self._send, limit=READERS_AT_ONCE, backlog=0)

    async def _send(self, request: Request) -> None:
        want = validate(ExportRead, request.data)
        op = self._operations.of_id(valid_uid(want.uid))
        if op is None:
            raise unknown_export(want.uid, self._node)
        check_owner(request.account, op.owner)
        file = await in_thread(lambda: open_export(self._state_dir, op.id, op.format))
        if file is None:
            raise unknown_export(op.id, self._node)
        try:
            async with accepting(self._bus, request, want) as stream:
                await stream.while_open(_copy(file, want.offset, stream))
        finally:
            file.close()


async def _copy(file: ExportFile, offset: int, stream: ByteStream) -> None:
    at = offset
    while data := await in_thread(partial(file.read, at)):
        await stream.write(data)
        at += len(data)
    stream.end(END_OF_FILE)
