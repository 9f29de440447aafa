"""Keeps the NATS server of `up` running, with its streams and this node's consumers."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning.cluster import ClusterMember
from virtbus.bus.provisioning.server import DEFAULT_PORT, Server, ServerFiles, binary, running
from virtbus.bus.provisioning.stream_setup import ensure, ensure_node, trust_host
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.up.bus_disk import BusDisk
from virtbus.cli.up.plan import ALL, STEADY_S, Place, rest_s
from virtbus.cli.up.terminal import Terminal
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode

_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the NATS server."""

    port: int = DEFAULT_PORT
    host: str = "127.0.0.1"
    nodes: tuple[str, ...] = ()
    """Ids of further nodes that may log in. Each gets credentials files in the run directory."""
    cluster: ClusterMember | None = None


class BusKeeper:
    """Keeps one NATS server running. `admin` is an admin's connection to the server."""

    def __init__(
        self,
        server: Server,
        admin: NatsBus,
        place: Place,
        terminal: Terminal,
        *,
        alone: bool = False,
    ) -> None:
        """Prepare the keeper. `alone` means that no other host may log in."""
        self.server = server
        self.admin = admin
        self._place = place
        self._terminal = terminal
        self._declared_at = -1
        self._waits = ""
        self._planned = False
        self._alone = alone
        self._disk = BusDisk(
            ServerFiles(place.state_dir, place.run_dir), admin, terminal, self.restart
        )

    @property
    def url(self) -> str:
        """The bus's URLs for clients, separated by commas."""
        return self.server.url

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keep_running())
            group.create_task(self.keep_declared())
            group.create_task(self._disk.keep())

    async def restart(self) -> None:
        """End the server. `keep_running` then starts it again at once."""
        self._planned = True
        await self.server.stop()

    async def declare(self) -> None:
        """Ensure that the streams, this node's consumers and its join record exist."""
        generation = self.admin.generation
        await ensure(self.admin)
        if self._place.runs == ALL:
            nonce = encode(JoinNonce(nonce=secrets.token_hex(16)))
            await ensure_node(self.admin, self._place.node, nonce)
            await trust_host(self.admin, self._place.node, trusted=self._alone)
        self._declared_at = generation

    async def keep_declared(self) -> None:
        """Call `declare` after each new connection, because a restart loses memory streams."""
        first = self._declared_at < 0
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.admin.connected and self.admin.generation != self._declared_at:
                try:
                    await self.declare()
                except (BusError, VirtbusError) as error:
                    if str(error) != self._waits:  # print each error only once
                        self._waits = str(error)
                        self._terminal.say(f"the bus cannot be declared yet: {error}", "WARNING")
                else:
                    again = "is declared" if first else "was restarted; it is declared again"
                    first, self._waits = False, ""
                    self._terminal.say(f"the bus {again}")

    async def keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            started = loop.time()
            code = await self.server.wait()
            deaths = 1 if loop.time() - started > STEADY_S else deaths + 1
            if not self._planned:
                pause_s = rest_s(deaths)
                self._terminal.say(
                    f"nats-server ended ({code}); it is started again in {pause_s:g} s", "WARNING"
                )
                await asyncio.sleep(pause_s)
            self._planned = False
            try:
                await self.server.start(binary(), self.server.port)
            except (
                BusError,
                OSError,
            ) as error:  # OSError: the server's files cannot be written, as on a full disk
                self._terminal.say(f"nats-server does not start: {error}", "ERROR")

    async def vms_here(self) -> int | None:
        try:
            asked = {"node": self._place.node}
            answer = await self.admin.request("virtbus.api.v1.node.get", asked, timeout_s=1.0)
        except Exception as error:  # noqa: BLE001  any failure: unknown
            self._terminal.say(f"the VMs cannot be counted: {error}", "DEBUG")
            return None
        node = answer.get("node") if isinstance(answer, dict) else None
        return int(node["vms"]) if isinstance(node, dict) and "vms" in node else None


@asynccontextmanager
async def bus(place: Place, wanted: Wanted, terminal: Terminal) -> AsyncIterator[BusKeeper]:
    """Run a bus while the context is open.

    A single server first creates its streams, and joins this host's node if any. In a cluster,
    `keep` does both later, because streams need the other members.

    Raises:
        CliError: the server does not start, or its streams cannot be created.
    """
    files = ServerFiles(place.state_dir, place.run_dir)
    own = (place.node,) if place.runs == ALL else ()
    nodes = tuple(dict.fromkeys((*own, *wanted.nodes)))
    try:
        async with (
            running(
                files,
                nodes=nodes,
                host=wanted.host,
                port=wanted.port,
                cluster=wanted.cluster,
            ) as server,
            connect(server.settings("admin"), name="up") as admin,
        ):
            alone = not wanted.nodes and wanted.cluster is None
            keeper = BusKeeper(server, admin, place, terminal, alone=alone)
            if wanted.cluster is None:
                await keeper.declare()
            yield keeper
    except VirtbusError as error:
        raise CliError(Exit.REFUSED, error.reason, str(error)) from error
    except BusError as error:
        raise CliError(Exit.UNAVAILABLE, "bus", str(error)) from error
