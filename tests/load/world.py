"""A whole control plane for a run: servers, controllers, simulated nodes, and a client of it."""

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.load.meters import Reading, cpu_s, memory_kib
from tests.load.population import Population
from tests.load.servers import Servers, names, serving
from tests.load.services import Service, running

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning.stream_setup import ensure, ensure_node
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode

PREFIX = "sim"
NODES_READY_S = 60.0
LIST_S = 60.0


@dataclass(frozen=True)
class Shape:
    """The size of a run, and its bus."""

    vms: int
    nodes: int
    replicas: int = 1
    sync: str = "always"
    in_flight: int = 64
    controllers: int = 1
    processes: int = 1
    churn_s: float = 30.0
    phase_s: float = 1800.0
    """The time limit of a phase; the failure lists missing VMs."""

    @property
    def bus(self) -> str:
        return f"R{self.replicas} {self.sync}"


@dataclass
class World:
    """All running parts."""

    shape: Shape
    servers: Servers
    services: list[Service]
    admin: NatsBus
    population: Population
    nodes_ready_s: float = 0.0

    @property
    def controllers(self) -> list[Service]:
        return [one for one in self.services if one.name.startswith("controller")]

    def pids(self) -> dict[str, list[int]]:
        """Processes by kind."""
        found: dict[str, list[int]] = {"nats-server": [one.pid for one in self.servers.processes]}
        for service in self.services:
            found.setdefault(service.name.partition("-")[0], []).append(service.pid)
        return found

    def read(self) -> Reading:
        """Read all meters now."""
        pids = self.pids()
        return Reading(
            at_s=time.monotonic(),
            cpu_s={name: sum(map(cpu_s, ids)) for name, ids in pids.items()}
            | {"client": time.process_time()},
            pss_kib={name: sum(map(memory_kib, ids)) for name, ids in pids.items()},
            bus=self.servers.monitored(),
        )

    async def stored(self, bucket: str) -> int:
        """Return the last sequence of a bucket: the number of messages it ever stored."""
        info = await self.admin.js_api(f"STREAM.INFO.{bucket}")
        return int(info["state"]["last_seq"])

    async def left(self) -> tuple[int, int]:
        """Return the records and name claims of VMs on the bus.

        A claim remains for the sweep, for two minutes at most, if a controller was killed
        between the purge of a record and that of its claim.
        """
        records = claims = 0
        async with asyncio.timeout(LIST_S), self.admin.watch("$KV.vm.>") as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    break
                if isinstance(item, Entry) and item.kind is EntryKind.PUT:
                    tokens = item.key.split(".")
                    claims += tokens[2] == "_name"
                    records += len(tokens) == 4 and not tokens[3].startswith("_")
        return records, claims


async def declared(admin: NatsBus, shape: Shape) -> None:
    """Declare the streams, as soon as the servers have a leader, and join every node."""
    async with asyncio.timeout(NODES_READY_S):
        while True:
            try:
                await ensure(admin, replicas=shape.replicas)
                break
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.2)
    nonce = encode(JoinNonce(nonce=secrets.token_hex(16)))
    places = asyncio.Semaphore(16)

    async def join(node: str) -> None:
        async with places:
            await ensure_node(admin, node, nonce)

    async with asyncio.TaskGroup() as group:
        for node in names(PREFIX, shape.nodes):
            group.create_task(join(node))


@asynccontextmanager
async def bus_of(shape: Shape) -> AsyncIterator[tuple[Servers, NatsBus, Path]]:
    """Servers with declared streams, in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="virtbus-load-", dir="/var/tmp"))
    try:
        async with (
            serving(folder, replicas=shape.replicas, sync=shape.sync) as servers,
            connect(servers.settings(), name="load") as admin,
        ):
            await declared(admin, shape)
            yield servers, admin, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def services_of(shape: Shape, folder: Path) -> list[Service]:
    """Controllers and the processes of simulated nodes."""
    services = [
        Service(f"controller-{number}", "virtbus.controller", folder)
        for number in range(shape.controllers)
    ]
    share = -(-shape.nodes // shape.processes)
    for number in range(shape.processes):
        first = number * share
        count = min(share, shape.nodes - first)
        arguments = ("--node", PREFIX, "--first", str(first), "--count", str(count))
        services.append(
            Service(
                f"simulated-{number}",
                "virtbus.simulator",
                folder,
                *arguments,
                yields=True,
            )
        )
    return services


@asynccontextmanager
async def world(shape: Shape) -> AsyncIterator[World]:
    """A control plane with all nodes ready; all of it is removed afterwards."""
    async with AsyncExitStack() as stack:
        servers, admin, folder = await stack.enter_async_context(bus_of(shape))
        servers.add(*(f"node-{node}" for node in names(PREFIX, shape.nodes)))
        services = services_of(shape, folder)
        begun = time.monotonic()
        stack.enter_context(running(*services))
        client = await stack.enter_async_context(
            connect(servers.settings("client"), name="load client")
        )
        here = World(shape, servers, services, admin, Population(client))
        for service in services:
            await service.ready()
        await nodes_ready(client, shape.nodes)
        here.nodes_ready_s = time.monotonic() - begun
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [
            group.create_task(here.population.follow()),
            group.create_task(here.population.sample()),
        ]
        async with asyncio.timeout(NODES_READY_S):
            await here.population.synced.wait()
        try:
            yield here
        finally:
            for task in tasks:
                task.cancel()


async def _listed_nodes(bus: NatsBus) -> list[dict[str, Any]]:
    """Return the nodes of all pages."""
    found: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    while True:
        page = await bus.request("virtbus.api.v1.node.list", more, timeout_s=30)
        found += page.get("items", ())
        if not page.get("continue"):
            return found
        more = {"continue": page["continue"]}


async def nodes_ready(bus: NatsBus, count: int) -> None:
    """Wait until every node reports all its services as ready."""
    async with asyncio.timeout(NODES_READY_S):
        while True:
            ready = [
                node
                for node in await _listed_nodes(bus)
                if node["state"] == "ready"
                and all(s.get("state") == "ready" for s in node["services"].values())
            ]
            if len(ready) >= count:
                return
            await asyncio.sleep(0.2)
