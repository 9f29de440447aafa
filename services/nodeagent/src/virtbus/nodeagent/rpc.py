"""`node.<id>.rpc.agent.*`: inspect, what guests say, and the console and log streams."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from virtbus.bus.ports import Bus, Endpoint, Message, Request, ServiceInfo
from virtbus.nodeagent.core.guest_answers import guest_info
from virtbus.nodeagent.core.ports import Console, ConsoleSession, GuestAgents
from virtbus.nodeagent.guest import Guest
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestAsk, GuestInfo
from virtbus.schemas.ids import check_id
from virtbus.schemas.nodework import ConsoleData, ConsoleOpen, Held, Inspect, LogsRead
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

VERSION = "0.1.0"
STREAMS_AT_ONCE = 200
RENEW_S = 30.0


class AgentRpc:
    """What others may ask of the agent."""

    def __init__(
        self, bus: Bus, node: str, console: Console, agents: GuestAgents | None = None
    ) -> None:
        """`agents` None: nobody answers for guests, which are simulated."""
        self._bus = bus
        self._node = node
        self._console = console
        self._agents = agents
        self._guests: Mapping[str, Guest] = {}
        self._recovering: Callable[[], bool] = lambda: True

    @asynccontextmanager
    async def serve(
        self,
        guests: Mapping[str, Guest],
        more: Sequence[Endpoint] = (),
        recovering: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[None]:
        """Answer while the context is open; `guests` is the agent's own, live map."""
        self._guests = guests
        self._recovering = recovering
        info = ServiceInfo("virtbus-nodeagent", VERSION, "domains", {"node": self._node})
        async with self._bus.serve(info, [*self._endpoints(), *more]):
            yield

    def _endpoints(self) -> list[Endpoint]:
        handlers: dict[str, Callable[[Request], Awaitable[object]]] = {
            "inspect": self._inspect,
            "console": self._open,
            "logs": self._logs,
            "guest": self._guest,
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

    async def _inspect(self, request: Request) -> Held:
        want = validate(Inspect, request.data)
        return Held(
            things={
                uid: (str(guest.phase),)
                for uid, guest in self._guests.items()
                if want.uid in {None, uid}
            }
        )

    def known(self, uid: str) -> None:
        """Raise 503 or 404 for a VM that is not here (yet)."""
        if uid not in self._guests and self._recovering():
            message = f"node {self._node} compares its host with the records; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message, after_ms=500)
        if uid not in self._guests:
            message = f"VM {uid} is not on node {self._node}; `virtbus vm get` shows where it is"
            raise VirtbusError(Code.NOT_FOUND, "vm_not_here", message)

    async def _guest(self, request: Request) -> GuestInfo:
        want = validate(GuestAsk, request.data)
        self.known(want.uid)
        if self._agents is None:
            message = f"the guests of node {self._node} are simulated: there is nobody to ask"
            raise VirtbusError(Code.UNSUPPORTED, "guest_simulated", message)
        return guest_info(await self._agents.ask(want.uid, want.about, timeout_s=want.timeout_s))

    # --- console --------------------------------------------------------------------------
    async def _open(self, request: Request) -> None:
        want = validate(ConsoleOpen, request.data)
        self.known(want.uid)
        subject = f"{subjects.rpc(self._node, 'agent', 'console')}.{check_id(want.session)}"
        async with (
            self._bus.subscribe(subject) as keys,
            self._console.attach(want.uid) as session,
        ):
            await request.stream(ConsoleData(input_subject=subject))
            async with asyncio.TaskGroup() as group:
                limit = asyncio.timeout(RENEW_S)
                typing = group.create_task(self._type(keys, session, limit))
                try:
                    async with limit:
                        async for output in session.output():
                            await request.stream(ConsoleData(data=output))
                    closed = session.closed or "the guest stopped"
                except TimeoutError:
                    closed = "the client went silent"
                finally:
                    typing.cancel()
                await request.stream(ConsoleData(closed=closed))

    async def _type(
        self, keys: AsyncIterator[Message], session: ConsoleSession, limit: asyncio.Timeout
    ) -> None:
        """Input of the client; an empty one only says that it is there."""
        async for message in keys:
            limit.reschedule(asyncio.get_running_loop().time() + RENEW_S)
            data = open_envelope(message.body).data
            if not isinstance(data, dict):
                continue
            if data.get("closed"):
                session.end("detached")
                return
            text = data.get("data", b"")
            await session.write(base64.b64decode(text) if isinstance(text, str) else text)

    # --- logs -----------------------------------------------------------------------------
    async def _logs(self, request: Request) -> None:
        want = validate(LogsRead, request.data)
        self.known(want.uid)
        if want.follow:
            await self._follow(want, request)
            return
        await self._tell_log(want, request)
        await request.stream(ConsoleData(closed="end of log"))

    async def _follow(self, want: LogsRead, request: Request) -> None:
        """Answer at once, though nothing is written yet; end when the client gives no sign."""
        subject = f"{subjects.rpc(self._node, 'agent', 'logs')}.{self._bus.sources.uuid7()}"
        async with self._bus.subscribe(subject) as signs:
            await request.stream(ConsoleData(input_subject=subject))
            async with asyncio.TaskGroup() as group:
                limit = asyncio.timeout(RENEW_S)
                listening = group.create_task(_listen(signs, limit))
                try:
                    async with limit:
                        await self._tell_log(want, request)
                except TimeoutError:
                    await request.stream(ConsoleData(closed="the client went silent"))
                finally:
                    listening.cancel()

    async def _tell_log(self, want: LogsRead, request: Request) -> None:
        lines = self._console.read_log(want.uid, tail_bytes=want.tail_bytes, follow=want.follow)
        async for output in lines:
            await request.stream(ConsoleData(data=output))


async def _listen(signs: AsyncIterator[Message], limit: asyncio.Timeout) -> None:
    """Put the limit off at each sign of the client; end it when the client leaves."""
    loop = asyncio.get_running_loop()
    async for message in signs:
        data = open_envelope(message.body).data
        left = isinstance(data, dict) and data.get("closed")
        limit.reschedule(loop.time() + (0 if left else RENEW_S))
