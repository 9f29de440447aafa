"""A node and its one guest, at the bus: they answer the aggregated API's requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.client.streams import ByteStream, accepting
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestFilesystem, GuestInfo, GuestOs, GuestUser
from virtbus.schemas.states import VmState
from virtbus.schemas.streams import PortOpen, StreamOpen
from virtbus.schemas.subjects import api, rpc
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

NODE = "n1"
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 1000
BANNER = b"RFB 003.008\n"
TOLD = GuestInfo(
    hostname="smoke",
    os=GuestOs(id="debian", name="Debian GNU/Linux", timezone="CET", utc_offset_s=3600),
    users=(GuestUser(name="admin", login_time_s=1.5),),
    filesystems=(GuestFilesystem(name="vda1", mountpoint="/", type="ext4", total_bytes=9),),
)


class GuestUnderTest:
    """`asked` are the verbs, `opened` the streams that were requested, in order.

    Its console, its display and all its ports except port 1 introduce themselves and echo their
    input; `quit` ends a console. Port 1 is refused.
    """

    def __init__(self, uid: str) -> None:
        self._server = MemoryServer()
        self.uid = uid
        self.asked: list[str] = []
        self.opened: list[StreamOpen] = []
        self.left = asyncio.Event()
        self.says: Callable[[ByteStream], Awaitable[None]] | None = None
        """A replacement for the console's behaviour."""

    def bus(self, name: str = "bridge") -> MemoryBus:
        return MemoryBus(self._server, name)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        bus = self.bus("node")
        verbs = ("get", "pause", "unpause", "reset", "soft-reboot", "freeze", "thaw")
        streams: dict[str, Callable[[ByteStream], Awaitable[None]]] = {
            "console": self._console,
            "port": _repeat,
            "vnc": self._show,
            "screenshot": self._shoot,
        }
        endpoints = [
            *(Endpoint(verb, api("vm", verb), self._verb) for verb in verbs),
            Endpoint("guest", rpc(NODE, "agent", "guest"), self._tell),
            *(
                Endpoint(one, rpc(NODE, "agent", one), self._stream(bus, serve), limit=99)
                for one, serve in streams.items()
            ),
        ]
        async with bus.serve(ServiceInfo("node", "0", "test"), endpoints):
            yield

    async def _verb(self, request: Request) -> Any:
        verb = request.subject.rpartition(".")[2]
        self._known(request.data.get("uid"))
        if verb != "get":
            self.asked.append(verb)
        return VmView(
            uid=self.uid,
            namespace="default",
            name="smoke",
            node=NODE,
            epoch=1,
            generation=1,
            revision=1,
            created_ns=1,
            spec=VmSpec(),
            state=VmState.RUNNING,
        )

    def _known(self, uid: object) -> None:
        if uid != self.uid:
            raise VirtbusError(Code.NOT_FOUND, "vm_unknown", f"there is no VM {uid}")

    async def _tell(self, request: Request) -> Any:
        self._known(request.data["uid"])
        return TOLD

    def _stream(
        self, bus: MemoryBus, serve: Callable[[ByteStream], Awaitable[None]]
    ) -> Callable[[Request], Awaitable[None]]:
        async def handle(request: Request) -> None:
            is_port = request.subject.endswith(".port")
            want = validate(PortOpen if is_port else StreamOpen, request.data)
            if isinstance(want, PortOpen) and want.port == 1:
                raise VirtbusError(Code.CONFLICT, "port_refused", "nothing listens on port 1")
            self.opened.append(want)
            udp = isinstance(want, PortOpen) and want.protocol == "udp"
            async with accepting(bus, request, want, datagrams=udp) as stream:
                await serve(stream)
            self.left.set()

        return handle

    async def _console(self, stream: ByteStream) -> None:
        if self.says is not None:
            await self.says(stream)
            return
        await stream.write(b"login: ")
        while data := await stream.read():
            await stream.write(data)
            if b"quit" in data:
                stream.end("the guest stopped")

    async def _show(self, stream: ByteStream) -> None:
        await stream.write(BANNER)
        await _repeat(stream)

    async def _shoot(self, stream: ByteStream) -> None:
        await stream.write(PICTURE)
        stream.end("end of picture")


async def _repeat(stream: ByteStream) -> None:
    while data := await stream.read():
        if data == b"bye":
            stream.end("the guest closed the connection")
            return
        await stream.write(data)
