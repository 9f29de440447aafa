"""Starts `virtbus-nodeagent`: builds its objects from the settings, and serves."""

import virtbus.bus.quick_start  # noqa: F401  before all other imports

import asyncio
import logging
import os
import platform
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

from virtbus.bus.client import connection, tracing
from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import UnavailableError
from virtbus.bus.runtime import device_socket, process
from virtbus.bus.runtime.pool_settings import load_pools
from virtbus.bus.runtime.settings import load
from virtbus.nodeagent.agent_ports import AgentEvents, AgentPorts
from virtbus.nodeagent.core.disk_sources import devices_with_images, held_volumes
from virtbus.nodeagent.core.ports import HostFacts
from virtbus.nodeagent.edge import local_socket
from virtbus.nodeagent.edge.admin import AdminSocket
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.device_door import DeviceDoor
from virtbus.nodeagent.edge.disk_files import HostDiskFiles
from virtbus.nodeagent.edge.freeze_files import DiskFreezes
from virtbus.nodeagent.edge.freezing import GuestFreezes
from virtbus.nodeagent.edge.guest_connections import GuestConnections
from virtbus.nodeagent.edge.host_facts import host_facts
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.identity import HostIdentity
from virtbus.nodeagent.edge.kvm_probe import usable
from virtbus.nodeagent.edge.pool_devices import report_devices
from virtbus.nodeagent.edge.pool_servers import PoolServers
from virtbus.nodeagent.edge.readiness_probe import ReadinessProbe
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.nodeagent.edge.seed_iso import SeedIsos
from virtbus.nodeagent.edge.shared_directories import HostDirectories
from virtbus.nodeagent.edge.volume_groups import followed_groups
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.nodeagent.instance import Ownership
from virtbus.nodeagent.local_ends import LocalEnds
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.service import NodeAgent
from virtbus.nodeagent.settings import Settings
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

QEMU = Path("/usr/bin/qemu-system-x86_64")


async def _accelerators(settings: Settings) -> tuple[str, ...]:
    """Return the accelerators of this host, best first: `kvm`, `tcg`."""
    if settings.accelerator == "tcg":
        return ("tcg",)
    if settings.accelerator == "kvm" or await usable(QEMU):
        return ("kvm", "tcg")
    return ("tcg",)


def _chosen(accelerators: tuple[str, ...], record: VmRecord) -> str:
    wanted = record.spec.domain.accelerator
    return accelerators[0] if wanted == "auto" else wanted


async def serve(settings: Settings) -> None:
    """Connect to libvirt and the bus, and serve until cancelled."""
    files = AgentFiles(settings.state_dir, settings.run_dir)
    async with AsyncExitStack() as stack:
        stack.enter_context(closing(files))
        files.open(settings.node)
        hypervisor = await stack.enter_async_context(
            LibvirtHypervisor(settings.libvirt_uri, starts_at_once=2 * (os.cpu_count() or 1))
        )
        freezes = GuestFreezes(hypervisor.guests, DiskFreezes(files.vms))
        await stack.enter_async_context(freezes.keeping())  # also while the bus is away
        ends = LocalEnds(hypervisor, freezes, files)
        bus = await _bus(stack, settings, ends)
        stack.enter_context(
            tracing.recording("nodeagent", settings.node, bus.emit, settings.otlp_endpoint)
        )
        pools = load_pools(settings.pools_file)
        accelerators = await _accelerators(settings)
        facts = await _host(settings, hypervisor, accelerators)
        own = await _ownership(settings, bus, hypervisor)
        tools = AgentPorts(
            bus=bus,
            settings=settings,
            hypervisor=hypervisor,
            files=files,
            seeds=SeedIsos(files.vms),
            disks=HostDiskFiles(settings.state_dir, pools, settings.devices_allowed),
            shares=HostDirectories(
                settings.run_dir,
                settings.wrapper.parent,
                settings.node,
                settings.directories_allowed,
            ),
            netd=AdminSocket(settings.run_dir / "netd" / "admin.sock"),
            reach=ReadinessProbe(files.console_log),
            events=AgentEvents(bus, settings.node),
            accelerator=partial(_chosen, accelerators),
            gate=own.prove,
            freezes=freezes,
            plugs=hypervisor.devices,
            layers=hypervisor.layers,
            backups=hypervisor.backups,
            reads=hypervisor.readings(settings.run_dir),
            logins=hypervisor.logins,
        )
        liveness = Heartbeat(bus, settings, facts, own)
        agent = NodeAgent(
            tools,
            liveness,
            AgentRpc(
                bus,
                settings.node,
                Consoles(files.console_socket, files.console_log),
                hypervisor.guests,
                GuestConnections(hypervisor.displays),
            ),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(own.keep())
            sizes = hypervisor.sizes(settings.node)
            servers = PoolServers(
                pools, liveness.pools.tell, tools.servers, sizes.asked, bus.sources.time_ns
            )
            group.create_task(servers.run())
            group.create_task(sizes.sweep())
            group.create_task(hypervisor.logins.sweep())
            group.create_task(report_devices(pools, liveness.pools.tell))
            door = DeviceDoor(
                settings.run_dir / device_socket.NAME,
                settings.state_dir / "disks",
                pools,
                settings.devices_allowed,
                lambda: devices_with_images(one.vm.record for one in agent.vms.actors.values()),
                followed_groups(group, pools, liveness.pools.tell),
            )
            ends.guests = actors = agent.vms.actors
            group.create_task(
                door.serve(lambda: held_volumes(one.vm.record for one in actors.values()))
            )
            await agent.run()


async def _bus(stack: AsyncExitStack, settings: Settings, ends: LocalEnds) -> Bus:
    """Serve the node's container runtime, and connect to the bus.

    Raises:
        UnavailableError: the bus is away. The agent first ends guests whose end the container
            runtime has requested. systemd then restarts the process.
    """
    door = local_socket.serving(settings.run_dir / "agent.sock", ends.end)
    await stack.enter_async_context(door)
    try:
        return await stack.enter_async_context(connection.connect(settings.bus(), name="nodeagent"))
    except UnavailableError:
        await ends.idle()
        raise


async def _ownership(settings: Settings, bus: Bus, hypervisor: LibvirtHypervisor) -> Ownership:
    identity = HostIdentity(settings.state_dir, settings.run_dir, settings.boot_id)

    async def end_guests() -> None:
        """End this agent's guests, because another host has the node and may run the same VMs."""
        for domain in await hypervisor.list_domains():
            if domain.active and await hypervisor.uses(domain.uid, settings.state_dir):
                log.warning(
                    "guest ended: the node belongs to another host", extra={"uid": domain.uid}
                )
                await hypervisor.destroy(domain.uid, forced=True)

    me = identity.me(bus.sources.uuid7)
    own = Ownership(bus, settings.node, me, identity, platform.node(), end_guests)
    await own.claim()
    return own


async def _host(
    settings: Settings, hypervisor: LibvirtHypervisor, accelerators: tuple[str, ...]
) -> Callable[[], HostFacts]:
    """Return a function that reads the host's facts.

    libvirt's versions and maximum of vCPUs are read only once, here. If libvirt does not answer
    within 10 s, they stay unknown until the agent's next start.
    """
    versions: dict[str, str] = {}
    max_vcpus = 0
    try:
        async with asyncio.timeout(10):
            versions, max_vcpus = await hypervisor.versions(), await hypervisor.max_vcpus()
    except Exception as error:  # noqa: BLE001 libvirt may start later
        log.warning("versions unknown: %s", error, extra={"code": "libvirt_down"})
    return lambda: host_facts(
        settings.state_dir,
        reserve=settings.disk_reserve_bytes,
        max_vcpus=max_vcpus,
        accelerators=accelerators,
        versions=versions,
    )


def main() -> None:
    """Run the console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
