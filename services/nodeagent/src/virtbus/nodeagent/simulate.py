"""`python -m virtbus.nodeagent.simulate`: hundreds of simulated nodes in one process.

Each is a real agent with its own credentials, connection, watch and libvirt test host. netd, imaged
and the disk are simulated. The state of a node ends with the process.
"""

import asyncio
import logging
import platform
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import ClassVar, cast

from pydantic import Field

from virtbus.bus.client import connection
from virtbus.bus.client.ports import Bus
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import load
from virtbus.nodeagent.agent_ports import AgentEvents, AgentPorts
from virtbus.nodeagent.core.ports import HostFacts
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.libvirt_calls import Inline
from virtbus.nodeagent.edge.libvirt_test_driver import scratch, test_host
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.service import NodeAgent
from virtbus.nodeagent.settings import Settings
from virtbus.nodeagent.simulated import Beside, LoopTurns, SimulatedNode
from virtbus.nodeagent.simulated_files import MemoryFiles, NoDisks, NoSeeds
from virtbus.schemas.quantity import Bytes

log = logging.getLogger(__name__)

STARTS_AT_ONCE = 8
JOINING_AT_ONCE = 20
"""A hundred concurrent connects would delay each other beyond their time limit."""


class FleetSettings(Settings):
    """Settings of the simulated fleet: its nodes are `<node>-000`, `<node>-001` and so on."""

    service: ClassVar[str] = "simulate"

    count: int = Field(1, ge=1, le=1000, description="number of nodes")
    first: int = Field(0, ge=0, le=999, description="number of the first node")
    cpus: int = Field(64, ge=1, description="CPUs that each node reports")
    memory: Bytes = Field(256 * 1024**3, ge=1024**3, description="memory that each node reports")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes' ids."""
        return tuple(f"{self.node}-{self.first + i:03d}" for i in range(self.count))

    @property
    def bus_user(self) -> str:
        return f"node-{self.node}"

    def of(self, node: str) -> Settings:
        """Return the settings of one node; the bus wrote its credentials."""
        return self.model_copy(update={"node": node, "simulate": True, "ask_after_s": 0.001})


class Rollcall:
    """Notifies the supervisor once every node is up."""

    def __init__(self, count: int) -> None:
        self._missing = count

    def up(self) -> None:
        """Count one more."""
        self._missing -= 1
        if not self._missing:
            process.notify("READY=1")


async def serve(settings: FleetSettings) -> None:
    """Run every node until cancelled."""
    joining, rollcall = asyncio.Semaphore(JOINING_AT_ONCE), Rollcall(settings.count)
    turns = LoopTurns()
    host = _host(settings)
    with scratch() as folder:
        async with asyncio.TaskGroup() as group:
            for node in settings.nodes:
                uri = test_host(folder / f"{node}.xml")
                run = _node(settings.of(node), host, uri, joining, turns, rollcall.up)
                group.create_task(run, name=node)


async def _node(
    settings: Settings,
    host: HostFacts,
    uri: str,
    joining: asyncio.Semaphore,
    turns: LoopTurns,
    up: Callable[[], None],
) -> None:
    node, files = settings.node, MemoryFiles()
    async with AsyncExitStack() as stack:
        async with joining:
            bus = await stack.enter_async_context(
                connection.connect(settings.bus(), name=f"simulated {node}")
            )
            hypervisor = await stack.enter_async_context(
                LibvirtHypervisor(uri, starts_at_once=STARTS_AT_ONCE, calls=Inline())
            )
            simulated = SimulatedNode(bus, node)
            await stack.enter_async_context(simulated.serve())
        tools = AgentPorts(
            bus=cast("Bus", Beside(bus, simulated, node, turns)),
            settings=settings,
            hypervisor=hypervisor,
            files=files,
            seeds=NoSeeds(),
            disks=NoDisks(),
            netd=simulated,
            reach=simulated,
            facts=AgentEvents(bus, node),
            accelerator=lambda _record: "tcg",
        )
        rpc = AgentRpc(bus, node, Consoles(files.console_socket, files.console_log))
        async with asyncio.TaskGroup() as group:
            group.create_task(simulated.tell())
            await NodeAgent(tools, Heartbeat(bus, settings, lambda: host), rpc, up).run()


def _host(settings: FleetSettings) -> HostFacts:
    return HostFacts(
        hostname=platform.node(),
        cpus=settings.cpus,
        memory_bytes=settings.memory,
        disk_free_bytes=1024**4,
        disk_reserve_bytes=0,
        max_vcpus=settings.cpus,
        accelerators=("tcg",),
        versions={"hypervisor": "simulated"},
    )


def main() -> None:
    """The console script."""
    settings = load(FleetSettings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
