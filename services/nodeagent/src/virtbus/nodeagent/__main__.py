"""`virtbus-nodeagent`: settings, bus, hypervisor, service; everything is wired here."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from virtbus.bus import client, process, tracing
from virtbus.bus.settings import load
from virtbus.bus.tasks import background
from virtbus.nodeagent.audit import Auditor
from virtbus.nodeagent.core.ports import HostFacts, NetdAdmin, Readiness
from virtbus.nodeagent.edge.admin import AdminSocket
from virtbus.nodeagent.edge.console import Consoles
from virtbus.nodeagent.edge.disk_files import DiskFiles
from virtbus.nodeagent.edge.doors import GuestDoors
from virtbus.nodeagent.edge.driver_file import test_host
from virtbus.nodeagent.edge.host_facts import host_facts
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.kvm_probe import usable
from virtbus.nodeagent.edge.reach import Reach
from virtbus.nodeagent.edge.record_files import StateFiles
from virtbus.nodeagent.edge.seed_iso import SeedIsos
from virtbus.nodeagent.liveness import Liveness
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.service import NodeAgent
from virtbus.nodeagent.settings import Settings
from virtbus.nodeagent.simulated import NoDisks, SimulatedNode
from virtbus.nodeagent.tools import Facts, Tools
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

QEMU = Path("/usr/bin/qemu-system-x86_64")


async def _accelerators(settings: Settings) -> tuple[str, ...]:
    """What guests may run on here, best first."""
    if settings.simulate or settings.accelerator == "tcg":
        return ("tcg",)
    if settings.accelerator == "kvm" or await usable(QEMU):
        return ("kvm", "tcg")
    return ("tcg",)


def _chosen(accelerators: tuple[str, ...]) -> Callable[[VmRecord], str]:
    def choose(record: VmRecord) -> str:
        wanted = record.spec.domain.accelerator
        return accelerators[0] if wanted == "auto" else wanted

    return choose


@asynccontextmanager
async def _state(settings: Settings) -> AsyncIterator[StateFiles]:
    files = StateFiles(settings.state_dir, settings.run_dir)
    files.open(settings.node)
    try:
        yield files
    finally:
        files.close()


async def serve(settings: Settings) -> None:
    """Connect to libvirt and the bus, and serve until cancelled."""
    async with AsyncExitStack() as stack:
        files = await stack.enter_async_context(_state(settings))
        bus = await stack.enter_async_context(client.connect(settings.bus(), name="nodeagent"))
        stack.enter_context(
            tracing.recording("nodeagent", settings.node, bus.emit, settings.otlp_endpoint)
        )
        cores = os.cpu_count() or 1
        uri = settings.libvirt_uri
        if settings.simulate:
            uri = test_host(settings.state_dir / "agent" / f"{settings.node}.xml")
        hypervisor = await stack.enter_async_context(
            LibvirtHypervisor(uri, starts_at_once=2 * cores)
        )
        accelerators = await _accelerators(settings)
        facts = await _host(settings, hypervisor, accelerators)
        if settings.simulate:
            simulated = SimulatedNode(bus, settings.node)
            await stack.enter_async_context(simulated.serve())
            (await stack.enter_async_context(background())).start(simulated.tell())
            settings = settings.model_copy(update={"ask_after_s": 0.001})  # they tell nothing
            arm: NetdAdmin = simulated
            ready: Readiness = simulated
        else:
            arm = AdminSocket(settings.run_dir / "netd" / "admin.sock")
            ready = reach = Reach(files.console_log)
            reach.open()
        tools = Tools(
            bus=bus,
            settings=settings,
            hypervisor=hypervisor,
            files=files,
            seeds=SeedIsos(files.vms),
            disks=NoDisks() if settings.simulate else DiskFiles(settings.state_dir),
            netd=arm,
            reach=ready,
            facts=Facts(bus, settings.node),
            accelerator=_chosen(accelerators),
        )
        await NodeAgent(
            tools,
            Liveness(bus, settings, facts),
            AgentRpc(
                bus,
                settings.node,
                Consoles(files.console_socket, files.console_log),
                None if settings.simulate else hypervisor.guests,
                None if settings.simulate else GuestDoors(hypervisor.displays),
            ),
            auditor=None
            if settings.simulate
            else Auditor(bus, settings.node, hypervisor, files, settings.state_dir),
        ).run()


async def _host(
    settings: Settings, hypervisor: LibvirtHypervisor, accelerators: tuple[str, ...]
) -> Callable[[], HostFacts]:
    """Facts of the host; versions are read once, the free disk at each beat."""
    versions: dict[str, str] = {}
    max_vcpus = 0
    try:
        async with asyncio.timeout(10):
            versions, max_vcpus = await hypervisor.versions(), await hypervisor.max_vcpus()
    except Exception as error:  # noqa: BLE001  libvirt may still come: the agent waits for it
        log.warning("versions unknown: %s", error, extra={"code": "libvirt_down"})
    return lambda: host_facts(
        settings.state_dir,
        reserve=settings.disk_reserve_bytes,
        max_vcpus=max_vcpus,
        accelerators=accelerators,
        versions=versions,
    )


def main() -> None:
    """The console script."""
    settings = load(Settings)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
