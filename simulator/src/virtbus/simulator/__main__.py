"""Starts `virtbus-simulator`: real agents on simulated hosts.

It runs one node with its state on disk, or many nodes whose state ends with the process. Each node
is a real agent with its own credentials, connection, watch and libvirt test host.
"""

import virtbus.bus.quick_start  # noqa: F401  before all other imports

import asyncio
import platform
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from virtbus.bus.client import connection, tracing
from virtbus.bus.client.ports import Bus
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import load
from virtbus.nodeagent.agent_ports import AgentEvents, AgentPorts
from virtbus.nodeagent.core.ports import HostFacts, Hypervisor, RecordFiles, Seeds
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.host_facts import host_facts
from virtbus.nodeagent.edge.identity import HostIdentity
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.nodeagent.instance import Ownership
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.service import NodeAgent
from virtbus.simulator.fleet_bus import FleetBus, LoopTurns
from virtbus.simulator.memory_files import MemoryFiles, NoDisks, NoSeeds
from virtbus.simulator.services import SimulatedNode
from virtbus.simulator.settings import SimulatorSettings
from virtbus.simulator.test_driver import hypervisor

ACCELERATORS = ("tcg",)
JOINING_AT_ONCE = 20
"""The limit of concurrent connects. A hundred concurrent connects would exceed their time limit."""


async def serve(settings: SimulatorSettings) -> None:
    """Run the nodes until cancelled."""
    if not settings.count:
        await _one(settings)
        return
    fleet = Fleet(settings)
    with TemporaryDirectory(prefix="virtbus-simulator-") as folder:
        async with asyncio.TaskGroup() as group:
            for node in settings.nodes:
                group.create_task(fleet.node(node, Path(folder) / f"{node}.xml"), name=node)


async def _one(settings: SimulatorSettings) -> None:
    """Run one node with the state folder and the instance key of a real agent."""
    from virtbus.nodeagent.edge.seed_iso import SeedIsos  # takes 3 MiB; a fleet needs none

    files = AgentFiles(settings.state_dir, settings.run_dir)
    identity = HostIdentity(settings.state_dir, settings.run_dir, settings.boot_id)
    async with AsyncExitStack() as stack:
        stack.enter_context(closing(files))
        files.open(settings.node)
        bus = await stack.enter_async_context(connection.connect(settings.bus(), name="simulator"))
        stack.enter_context(
            tracing.recording("nodeagent", settings.node, bus.emit, settings.otlp_endpoint)
        )
        host = await stack.enter_async_context(
            hypervisor(settings.state_dir / "agent" / f"{settings.node}.xml")
        )
        versions, max_vcpus = await host.versions(), await host.max_vcpus()
        me = identity.me(bus.sources.uuid7)
        own = Ownership(bus, settings.node, me, identity, platform.node())
        await own.claim()
        simulated = SimulatedNode(bus, settings.node)
        await stack.enter_async_context(simulated.serve())
        ports = _ports(bus, settings, host, simulated, files, SeedIsos(files.vms))
        agent = NodeAgent(
            replace(ports, gate=own.prove),
            Heartbeat(
                bus,
                settings,
                lambda: host_facts(
                    settings.state_dir,
                    reserve=lambda _disk_bytes: 0,
                    max_vcpus=max_vcpus,
                    accelerators=ACCELERATORS,
                    versions=versions,
                ),
                own,
            ),
            AgentRpc(bus, settings.node, Consoles(files.console_socket, files.console_log)),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(own.keep())
            group.create_task(simulated.report())
            await agent.run()


def _ports(
    bus: Bus,
    settings: SimulatorSettings,
    host: Hypervisor,
    simulated: SimulatedNode,
    files: RecordFiles,
    seeds: Seeds,
) -> AgentPorts:
    return AgentPorts(
        bus=bus,
        settings=settings,
        hypervisor=host,
        files=files,
        seeds=seeds,
        disks=NoDisks(),
        netd=simulated,
        reach=simulated,
        events=AgentEvents(bus, settings.node),
        accelerator=lambda _record: ACCELERATORS[0],
    )


class Fleet:
    """Runs many nodes on one loop. systemd is notified once all nodes are up."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self._settings = settings
        self._joining = asyncio.Semaphore(JOINING_AT_ONCE)
        self._turns = LoopTurns()
        self._missing = settings.count
        self._host = HostFacts(
            hostname=platform.node(),
            cpus=settings.cpus,
            memory_bytes=settings.memory,
            disk_free_bytes=1024**4,
            disk_reserve_bytes=0,
            max_vcpus=settings.cpus,
            accelerators=ACCELERATORS,
            versions={"hypervisor": "simulated"},
        )

    def _up(self) -> None:
        self._missing -= 1
        if not self._missing:
            process.notify("READY=1")

    async def node(self, node: str, description: Path) -> None:
        """Run one node until cancelled. `description` is the file of its libvirt test host."""
        settings, files = self._settings.model_copy(update={"node": node}), MemoryFiles()
        async with AsyncExitStack() as stack:
            async with self._joining:
                bus = await stack.enter_async_context(
                    connection.connect(settings.bus(), name=f"simulated {node}")
                )
                host = await stack.enter_async_context(hypervisor(description))
                simulated = SimulatedNode(bus, node)
                await stack.enter_async_context(simulated.serve())
            in_turns = cast("Bus", FleetBus(bus, simulated, node, self._turns))
            agent = NodeAgent(
                _ports(in_turns, settings, host, simulated, files, NoSeeds()),
                Heartbeat(bus, settings, lambda: self._host),
                AgentRpc(bus, node, Consoles(files.console_socket, files.console_log)),
                self._up,
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(simulated.report())
                await agent.run()


def main() -> None:
    """Run the console script."""
    settings = load(SimulatorSettings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
