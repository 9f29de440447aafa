"""A guest's SSH server, which runs commands as processes of the test."""

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncssh

from virtbus.bus.runtime.tasks import background


class Guest:
    """The server; without `serving` nothing listens on its port."""

    def __init__(self) -> None:
        self.port = 1
        self.keys: list[str] = []
        """The lines of authorized_keys, set from the seed of the pod's VM."""
        self.sizes: list[tuple[int, int]] = []
        """Sizes of the terminal of the last command."""
        self.signals: list[str] = []
        """Signals to commands."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen on a free port of the loopback; a later time on the same one."""
        guest = self

        class Login(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                self._conn = conn

            def begin_auth(self, username: str) -> bool:
                lines = "\n".join(guest.keys if username == "root" else ())
                self._conn.set_authorized_keys(asyncssh.import_authorized_keys(lines))
                return True

        server = await asyncssh.create_server(
            Login,
            "127.0.0.1",
            0 if self.port == 1 else self.port,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            process_factory=self._run,
            encoding=None,
        )
        self.port = server.get_port()
        try:
            yield
        finally:
            server.close()

    async def _run(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        words = shlex.split(process.command or "")
        if words == ["size"]:
            await self._tell_sizes(process)
            return
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            async with background() as tasks:
                tasks.start(_feed(process, child.stdin))
                tasks.start(self._end(process, child))
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(child.stdout, process.stdout))
                    group.create_task(_copy(child.stderr, process.stderr))
                process.exit(await child.wait())
        finally:
            child.stdin.close()
            await child.wait()

    async def _end(
        self, process: "asyncssh.SSHServerProcess[bytes]", child: asyncio.subprocess.Process
    ) -> None:
        """Kill the command at a signal, which the library shows to a reader of the input."""
        while not process.stdin.at_eof():
            await asyncio.sleep(0.01)
        while True:
            try:
                await process.stdin.read(1)
            except asyncssh.SignalReceived as error:
                self.signals.append(error.signal)
                child.kill()
                return
            await asyncio.sleep(0.01)

    async def _tell_sizes(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        """End after the first change of the terminal's size."""
        try:
            await process.stdin.read()
        except asyncssh.TerminalSizeChanged as change:
            self.sizes.append((change.width, change.height))
        process.stdout.write(process.term_type.encode() if process.term_type else b"none")
        process.exit(0)


async def _feed(process: "asyncssh.SSHServerProcess[bytes]", target: asyncio.StreamWriter) -> None:
    while data := await process.stdin.read(8192):
        target.write(data)
        await target.drain()
    target.close()


async def _copy(source: asyncio.StreamReader, target: "asyncssh.SSHWriter[bytes]") -> None:
    while data := await source.read(8192):
        target.write(data)
        await target.drain()
