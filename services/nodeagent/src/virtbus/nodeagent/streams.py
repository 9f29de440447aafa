"""The streams of a node's VMs: consoles and their logs (ADR 0023)."""

from collections.abc import Awaitable, Callable

from virtbus.bus.ports import Bus, Endpoint, Request
from virtbus.bus.streams import Stream, accepting
from virtbus.nodeagent.core.ports import Console, ConsoleViewer
from virtbus.schemas import subjects
from virtbus.schemas.streams import ConsoleOpen, LogsRead
from virtbus.schemas.wire import validate

STREAMS_AT_ONCE = 200
"""Of each kind on one node."""
END_OF_LOG = "end of log"


class Streams:
    """What clients may open; each stream lives as long as its request's handler."""

    def __init__(self, bus: Bus, node: str, console: Console, known: Callable[[str], None]) -> None:
        """`known` raises for a VM that is not here."""
        self._bus = bus
        self._node = node
        self._console = console
        self._known = known

    def endpoints(self) -> list[Endpoint]:
        """One for each kind of stream; over the limit the answer is 429, nobody waits."""
        handlers: dict[str, Callable[[Request], Awaitable[None]]] = {
            "console": self._view,
            "logs": self._read,
        }
        return [
            Endpoint(
                f"agent-{verb}",
                subjects.rpc(self._node, "agent", verb),
                handler,
                limit=STREAMS_AT_ONCE,
                backlog=0,
            )
            for verb, handler in handlers.items()
        ]

    async def _view(self, request: Request) -> None:
        want = validate(ConsoleOpen, request.data)
        self._known(want.uid)
        console = self._console.attach(
            want.uid, write=want.write, tail_bytes=want.tail_bytes, owner=want.owner
        )
        async with console as viewer, accepting(self._bus, request, want) as stream:
            await stream.while_open(_show(viewer, stream), _type(stream, viewer))

    async def _read(self, request: Request) -> None:
        want = validate(LogsRead, request.data)
        self._known(want.uid)
        async with accepting(self._bus, request, want) as stream:
            await stream.while_open(self._tell_log(want, stream))

    async def _tell_log(self, want: LogsRead, stream: Stream) -> None:
        log = self._console.read_log(want.uid, tail_bytes=want.tail_bytes, follow=want.follow)
        async for output in log:
            await stream.write(output)
        stream.end(END_OF_LOG)


async def _show(viewer: ConsoleViewer, stream: Stream) -> None:
    async for output in viewer.output():
        if isinstance(output, str):
            await stream.note(output)
        else:
            await stream.write(output)
    stream.end(viewer.closed)


async def _type(stream: Stream, viewer: ConsoleViewer) -> None:
    """Input that ends ends no session: who piped it in reads on."""
    while keys := await stream.read():
        await viewer.write(keys)
