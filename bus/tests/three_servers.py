"""A cluster of three real servers in this process's network namespace."""

import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from virtbus.bus.provisioning import server
from virtbus.bus.provisioning.cluster import ClusterMember
from virtbus.bus.runtime.bus_settings import BusSettings

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NODES = ("n1", "n2")


class ThreeServers:
    """The running servers, and connections to all of them as a role."""

    def __init__(self, base: Path, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._port, route_port = _free_port(), _free_port()
        self._routes = tuple(f"{host}:{route_port}" for host in HOSTS)
        self._files = [
            server.ServerFiles(base / host / "state", base / host / "run") for host in HOSTS
        ]
        self.servers: list[server.Server] = []

    async def add(self) -> None:
        """Start the next server: each has an address of 127/8, all share one passwords file."""
        number = len(self.servers)
        files = self._files[number]
        if number:
            files.state_dir.mkdir(parents=True)
            shutil.copy(self._files[0].passwords, files.passwords)
        running = server.running(
            files,
            nodes=NODES,
            host=HOSTS[number],
            port=self._port,
            cluster=ClusterMember(self._routes[number], self._routes),
        )
        self.servers.append(await self._stack.enter_async_context(running))

    def settings(self, user: str) -> BusSettings:
        return self.servers[0].settings(user)

    async def restart(self, number: int) -> None:
        """Restart a killed or stopped server."""
        await self.servers[number].start(server.binary(), self._port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def three_servers(base: Path, *, at_first: int = 3) -> AsyncIterator[ThreeServers]:
    """A cluster, of which `at_first` servers are started."""
    async with AsyncExitStack() as stack:
        three = ThreeServers(base, stack)
        for _ in range(at_first):
            await three.add()
        yield three
