"""A cluster in one process: controllers, nodes and users on a simulated bus, by the seed."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from tests.sim import operations
from tests.sim.backup_hand import BackupDirectory
from tests.sim.bus import SimBus
from tests.sim.guest_backups import SimBackups, SimLayers
from tests.sim.hands import Hand
from tests.sim.hostports import (
    NoConsole,
    SimAdmin,
    SimFiles,
    SimHypervisor,
    SimLives,
    SimSeeds,
    host_facts,
)
from tests.sim.hot_disks import SimDisks, SimPlugs
from tests.sim.loop import Process, VirtualLoop
from tests.sim.machine import Disk, Host
from tests.sim.observer import Observer
from tests.sim.wire import SimLink, SimServer

from virtbus.bus.client.local_agent import LocalAgent
from virtbus.bus.provisioning import permissions
from virtbus.bus.provisioning.permissions import Role
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings as ControllerSettings
from virtbus.nodeagent.agent_ports import AgentEvents, AgentPorts
from virtbus.nodeagent.heartbeat import Heartbeat
from virtbus.nodeagent.instance import Ownership
from virtbus.nodeagent.rpc import AgentRpc
from virtbus.nodeagent.service import NodeAgent
from virtbus.nodeagent.settings import Settings as AgentSettings
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode

NONCE = "the-one-bus"


@cache
def controller_settings() -> ControllerSettings:
    # Orphans are swept within the last minute of a seed; the grace only saves work.
    return ControllerSettings(
        sweep_interval_s=15, orphan_grace_s=15, operation_keep_s=operations.KEEP_S
    )


@cache
def agent_settings(node: str) -> AgentSettings:
    return AgentSettings(node=node)


@cache
def node_role(node: str) -> Role:
    return permissions.agent(node)


@cache
def controller_role() -> Role:
    return permissions.controller()


@cache
def client_role() -> Role:
    return permissions.client()


@dataclass(eq=False)
class Service:
    """A process that is restarted after it died; `host` is empty for a controller."""

    name: str
    kind: Literal["controller", "agent", "imaged", "netd"]
    host: str
    make: Callable[["Service"], Coroutine[Any, Any, None]]
    process: Process | None = None
    link: SimLink | None = None
    bus: SimBus | None = None
    hand: Hand | None = None
    skew_ns: int = 0
    crash_at: int = 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive


@dataclass
class World:
    """The whole cluster. `shuffle`: processes take turns in an order that the seed draws."""

    seed: int
    nodes: int = 3
    controllers: int = 2
    shuffle: bool = True
    controller_bus: type[SimBus] = SimBus
    """The controllers' bus: a test plants a bug here."""
    pace: int = 1
    """The seconds that all processes' clocks show for each second of the loop."""
    loop: VirtualLoop = field(init=False)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.loop = VirtualLoop(self.rng, shuffle=self.shuffle, pace=self.pace)
        self.observer = Observer(self.loop)
        self.server = SimServer(self.loop, self.rng)
        self.server.wrote = self.observer.wrote
        self.server.denied = lambda what: self.observer.wrong("I7", what)
        self.hosts = {
            name: Host(self.loop, self.rng, name, self.observer)
            for name in (f"n{number}" for number in range(1, self.nodes + 1))
        }
        self.observer.hosts = dict(self.hosts)
        if self.seed % 2:  # the nodes share one directory of backups
            directory = BackupDirectory()
            for one in self.hosts.values():
                one.backups = directory
        self.observer.server = self.server
        self.observer.slowest_ns = self._slowest_ns
        self.copies: dict[str, Host] = {}
        """Hosts with the credentials of another one."""
        self.services: dict[str, Service] = {}
        for number in range(1, self.controllers + 1):
            self._add(f"c{number}", "controller", "", self._controller)
        for host in self.hosts:
            self._add(f"{host}-imaged", "imaged", host, self._hand)
            self._add(f"{host}-netd", "netd", host, self._hand)
            self._add(f"{host}-agent", "agent", host, self._agent)

    def _add(
        self,
        name: str,
        kind: Literal["controller", "agent", "imaged", "netd"],
        host: str,
        make: Callable[[Service], Coroutine[Any, Any, None]],
    ) -> None:
        self.services[name] = Service(name, kind, host, make)

    def _slowest_ns(self) -> int:
        skews = [one.skew_ns for one in self.services.values() if one.kind == "controller"]
        return self.loop.shown_ns() + min(skews)

    def machine(self, name: str) -> Host:
        """A host, or a copy of one."""
        return self.hosts.get(name) or self.copies[name]

    def copy(self, of: str, disk: Disk) -> Host:
        """Add one more host with the credentials of `of`, and this disk; its services start."""
        name = f"{of}-copy{len(self.copies) + 1}"
        host = Host(self.loop, self.rng, name, self.observer, of)
        host.disk = disk
        self.copies[name] = self.observer.hosts[name] = host
        self._add(f"{name}-imaged", "imaged", name, self._hand)
        self._add(f"{name}-netd", "netd", name, self._hand)
        self._add(f"{name}-agent", "agent", name, self._agent)
        for service in self.of_host(name):
            self.start(service)
        self.observer.note("copy", name)
        return host

    def scrap(self, copy: Host) -> None:
        """Remove it permanently."""
        self.observer.note("scrap", copy.name)
        for service in self.of_host(copy.name):
            self.crash(service, None)
        copy.power_off()

    # --- processes ------------------------------------------------------------------------
    def process(
        self, name: str, role: Role, skew_ns: Callable[[], int], bus: type[SimBus] = SimBus
    ) -> tuple[Process, SimBus]:
        """Make a process with its own connection."""
        process = Process(self.loop, name)
        return process, bus(SimLink(self.server, process), role, skew_ns)

    def start(self, service: Service) -> None:
        """Start it unless it runs, or its host is down."""
        if service.running or (service.host and not self.machine(service.host).up):
            return
        node = self.machine(service.host).node if service.host else ""
        role = node_role(node) if node else controller_role()
        service.process, service.bus = self.process(
            service.name,
            role,
            lambda: service.skew_ns,
            SimBus if service.host else self.controller_bus,
        )
        service.link = service.bus.link
        service.process.crash_at = service.crash_at
        service.process.on_crash = lambda: self.crash(service)
        service.process.start(lambda: self._body(service))
        self.observer.note("start", service.name)

    async def _body(self, service: Service) -> None:
        """Run it as a process: an exit by itself is a defect, and systemd restarts it."""
        try:
            await service.make(service)
        except Exception as error:  # noqa: BLE001  the frame of a process
            if _second(error):
                self.loop.outside(self.loop.time(), lambda: self.crash(service))
            elif not self.loop.over:
                self.observer.wrong("I16", f"{service.name} ended by itself: {error!r}")

    def crash(self, service: Service, back_s: float | None = 1.0) -> None:
        """Kill it with SIGKILL; it is back after `back_s` (None: never)."""
        if not service.running:
            return
        self.observer.note("crash", service.name)
        assert service.process is not None
        assert service.link is not None
        service.process.kill()
        self.server.close(service.link)
        if service.kind == "agent":
            host = self.machine(service.host)
            host.listeners = [(p, hear) for p, hear in host.listeners if p.alive]
        if service.kind == "netd":
            self.machine(service.host).armed.clear()
        if back_s is not None:
            self.loop.outside(self.loop.time() + back_s, lambda: self.start(service))

    def of_host(self, host: str) -> list[Service]:
        return [service for service in self.services.values() if service.host == host]

    def power_off(self, host: str, back_s: float | None) -> None:
        """Kill the whole host; it boots again after `back_s` (None: by `power_on`)."""
        machine = self.hosts[host]
        if not machine.up:
            return
        self.observer.note("power off", host)
        for service in self.of_host(host):
            self.crash(service, None)
        machine.power_off()
        if back_s is not None:
            self.loop.outside(self.loop.time() + back_s, lambda: self.power_on(host))

    def power_on(self, host: str) -> None:
        """Boot it, and start its services."""
        self.hosts[host].power_on()
        self.observer.note("power on", host)
        for service in self.of_host(host):
            self.start(service)

    # --- services -------------------------------------------------------------------------
    async def _controller(self, service: Service) -> None:
        assert service.bus is not None
        await ControllerService(service.bus, controller_settings(), _declared).run()

    async def _agent(self, service: Service) -> None:
        bus, process, host = service.bus, service.process, self.machine(service.host)
        assert bus is not None
        assert process is not None
        netd = self.services[f"{host.name}-netd"]
        admin = SimAdmin(
            host,
            process,
            lambda: netd.running and netd.hand is not None and not netd.hand.recovering,
        )
        settings = agent_settings(host.node)
        hypervisor, files = SimHypervisor(host, process), SimFiles(host, process)
        lives = SimLives(host, process)
        own = Ownership(bus, host.node, lives.me(bus.sources.uuid7), lives, host.name)
        await own.claim()
        tools = AgentPorts(
            bus=bus,
            settings=settings,
            hypervisor=hypervisor,
            files=files,
            seeds=SimSeeds(host, process),
            disks=SimDisks(host),
            netd=admin,
            reach=admin,
            events=AgentEvents(bus, host.node),
            accelerator=lambda _record: "tcg",
            gate=own.prove,
            plugs=SimPlugs(host, process),
            layers=SimLayers(host, process),
            backups=SimBackups(host, process),
        )
        agent = NodeAgent(
            tools,
            Heartbeat(bus, settings, lambda: host_facts(host), own),
            AgentRpc(bus, host.node, NoConsole()),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(own.keep())
            await agent.run()

    async def _hand(self, service: Service) -> None:
        assert service.bus is not None
        assert service.process is not None
        assert service.kind in {"imaged", "netd"}
        kind: Literal["imaged", "netd"] = "imaged" if service.kind == "imaged" else "netd"
        host = self.machine(service.host)
        agent = LocalAgent(service.bus, host.node, lambda: host.agent_word)
        await agent.begin()
        service.hand = Hand(kind, service.bus, host, service.process, agent.gate)
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.keep())
            await service.hand.run()

    # --- running --------------------------------------------------------------------------
    def begin(self) -> None:
        """Join the nodes and start every service."""
        for host in self.hosts:
            key = subjects.join_nonce(host)
            self.server.shelf(key).apply(key, encode(JoinNonce(nonce=NONCE)))
        for service in self.services.values():
            self.start(service)

    def run_until(self, at_s: float) -> None:
        """Advance virtual time."""
        self.loop.outside(at_s, self.loop.stop)
        self.loop.run_forever()
        for told in self.loop.unhandled:
            self.observer.wrong(
                "I16", f"unhandled: {told.get('message')} {told.get('exception')!r}"
            )
        self.loop.unhandled.clear()

    def close(self) -> None:
        """Unwind everything."""
        self.loop.bury()


def _second(error: BaseException) -> bool:
    """The exit of a service whose node belongs to another host: systemd restarts it."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_second, error.exceptions))
    return isinstance(error, VirtbusError) and error.reason == "second_instance"


async def _declared() -> None:
    """The simulated bus needs no declaration of its streams."""
