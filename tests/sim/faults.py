"""The nemesis: each seed enables some of the faults (swarm testing), until all is healed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.machine import Disk, copy_of
from tests.sim.world import Service, World

from virtbus.schemas import subjects

FAULTS_FROM_S = 5.0
HEAL_S = 215.0


@dataclass
class Nemesis:
    """Draws faults at random times. `only` limits it to these kinds."""

    world: World
    only: frozenset[str] | None = None
    enabled: list[str] = field(default_factory=list)
    old_disks: dict[str, Disk] = field(default_factory=dict)

    def begin(self) -> None:
        """Draw the kinds and their pace."""
        rng = self.world.rng
        for name, (fault, mean_s) in self._kinds().items():
            if rng.random() < 0.4 and (self.only is None or name in self.only):
                self.enabled.append(name)
                self._next(fault, mean_s * rng.uniform(0.5, 2.0))
        for name, change in self._moods().items():
            if rng.random() < 0.35 and (self.only is None or name in self.only):
                self.enabled.append(name)
                change(rng)
        # Later kinds draw from another generator, so that earlier seeds keep their runs.
        later = random.Random(f"{self.world.seed} later kinds")
        for name, (fault, mean_s) in self._later_kinds().items():
            if later.random() < 0.25 and (self.only is None or name in self.only):
                self.enabled.append(name)
                self._next(fault, mean_s * later.uniform(0.5, 2.0))
        self.world.observer.note("faults", *self.enabled)
        self.world.loop.outside(HEAL_S, self.heal)

    def _next(self, fault: Callable[[], None], mean_s: float) -> None:
        loop = self.world.loop
        at_s = max(loop.time(), FAULTS_FROM_S) + self.world.rng.expovariate(1 / mean_s)
        if at_s >= HEAL_S - 1:
            return

        def strike() -> None:
            fault()
            self._next(fault, mean_s)

        loop.outside(at_s, strike)

    def _kinds(self) -> dict[str, tuple[Callable[[], None], float]]:
        """Kind → its action, and seconds between two on average."""
        return {
            "crash-controller": (lambda: self._crash("controller"), 25.0),
            "crash-agent": (lambda: self._crash("agent"), 20.0),
            "crash-hand": (lambda: self._crash("imaged", "netd"), 25.0),
            "crash-host": (self._power_off, 60.0),
            "cut": (self._cut, 15.0),
            "cut-host": (self._cut_host, 50.0),
            "half-open": (self._half_open, 20.0),
            "leader": (self._leader, 30.0),
            "relist": (self._relist, 10.0),
            "empty-bus": (self._empty_bus, 50.0),
            "sigstop": (self._stall, 25.0),
            "libvirtd": (self._libvirt, 40.0),
            "guest-crash": (lambda: self._guest(halt=False), 20.0),
            "guest-halt": (lambda: self._guest(halt=True), 20.0),
            "clock": (self._clock, 30.0),
        }

    def _later_kinds(self) -> dict[str, tuple[Callable[[], None], float]]:
        return {
            "disk-full": (self._disk_full, 30.0),
            "bus-full": (self._bus_full, 40.0),
            "copied-host": (self._copied_host, 40.0),
            "rot": (self._rot, 30.0),
        }

    def _moods(self) -> dict[str, Callable[[random.Random], None]]:
        """Kind → the probabilities that it sets from the start."""
        weather = self.world.server.weather
        tempers = [host.temper for host in self.world.hosts.values()]

        def all_hosts(name: str, value: float) -> None:
            for temper in tempers:
                setattr(temper, name, value)

        def slow_disk(rng: random.Random) -> None:
            for temper in tempers:
                temper.io_s = (0.001, rng.uniform(0.1, 2.0))

        def slow_parts(rng: random.Random) -> None:
            for temper in tempers:
                temper.part_s = (0.01, rng.uniform(1.0, 8.0))

        return {
            "slow": lambda rng: setattr(weather, "slow", rng.uniform(0.01, 0.2)),
            "drop": lambda rng: setattr(weather, "drop_core", rng.uniform(0.01, 0.2)),
            "repeat": lambda rng: setattr(weather, "repeat_core", rng.uniform(0.05, 0.5)),
            "lose-request": lambda rng: setattr(weather, "lose_request", rng.uniform(0.01, 0.08)),
            "lose-answer": lambda rng: setattr(weather, "lose_answer", rng.uniform(0.01, 0.08)),
            "start-fails": lambda rng: all_hosts("start_fails", rng.uniform(0.05, 0.4)),
            "deaf": lambda rng: all_hosts("deaf", rng.uniform(0.1, 0.6)),
            "events-twice": lambda rng: all_hosts("events_twice", rng.uniform(0.1, 0.5)),
            "events-lost": lambda rng: all_hosts("events_lost", rng.uniform(0.05, 0.3)),
            "part-fails": lambda rng: all_hosts("part_fails", rng.uniform(0.05, 0.4)),
            "slow-disk": slow_disk,
            "slow-parts": slow_parts,
        }

    # --- kinds ----------------------------------------------------------------------------
    def _some(self, *kinds: str) -> Service:
        there = [s for s in self.world.services.values() if not kinds or s.kind in kinds]
        return self.world.rng.choice(there)

    def _crash(self, *kinds: str) -> None:
        self.world.crash(self._some(*kinds), self.world.rng.uniform(0.2, 6.0))

    def _power_off(self) -> None:
        rng = self.world.rng
        self.world.power_off(rng.choice(list(self.world.hosts)), rng.uniform(3.0, 25.0))

    def _cut(self) -> None:
        self._cut_one(self._some(), self.world.rng.uniform(0.1, 15.0))

    def _cut_one(self, service: Service, for_s: float) -> None:
        link = service.link
        if link is not None and service.running:
            self.world.observer.note("cut", service.name)
            link.cut()
            self.world.loop.outside(self.world.loop.time() + for_s, link.join)

    def _cut_host(self) -> None:
        rng = self.world.rng
        for_s = rng.uniform(5.0, 50.0)
        for service in self.world.of_host(rng.choice(list(self.world.hosts))):
            self._cut_one(service, for_s)

    def _half_open(self) -> None:
        service = self._some()
        if service.link is not None:
            service.link.stall(self.world.rng.uniform(0.5, 12.0))

    def _leader(self) -> None:
        self.world.observer.note("no leader")
        self.world.server.lose_leader(self.world.rng.uniform(4.0, 9.0))

    def _relist(self) -> None:
        watches = self.world.server.watches
        if watches:
            self.world.rng.choice(watches)()

    def _empty_bus(self) -> None:
        self.world.observer.note("the bus is empty")
        self.world.server.empty(self.world.rng.uniform(0.5, 15.0))

    def _stall(self) -> None:
        service = self._some()
        if service.process is not None and service.running:
            self.world.observer.note("sigstop", service.name)
            service.process.stall(self.world.rng.uniform(0.5, 20.0))

    def _libvirt(self) -> None:
        rng = self.world.rng
        host = self.world.hosts[rng.choice(list(self.world.hosts))]
        self.world.observer.note("libvirtd restarts", host.name)
        host.restart_libvirt(rng.uniform(0.5, 10.0))

    def _disk_full(self) -> None:
        rng = self.world.rng
        host = self.world.hosts[rng.choice(list(self.world.hosts))]
        self.world.observer.note("disk full", host.name)
        host.full = True
        self.world.loop.outside(self.world.loop.time() + rng.uniform(1.0, 30.0), host.free)

    def _bus_full(self) -> None:
        rng, server = self.world.rng, self.world.server
        server.full = rng.choice(("refuses", "mute"))
        self.world.observer.note("bus full", server.full)
        self.world.loop.outside(self.world.loop.time() + rng.uniform(1.0, 15.0), server.free)

    def _copied_host(self) -> None:
        """Add one more host with a node's credentials: a clone, an old disk of it, or neither.

        Before the node's own agent has its key, the first host that asks gets the node, and only a
        person gives it to another one (ADR 0031). So such a copy would be the node itself.
        """
        rng, world = self.world.rng, self.world
        host = world.hosts[rng.choice(list(world.hosts))]
        now = copy_of(host.disk)
        old = self.old_disks.setdefault(host.name, now)
        if rng.random() < 0.5:
            self.old_disks[host.name] = now
        disk, key = rng.choice((now, old, Disk())), subjects.node_instance(host.name)
        if key not in world.server.shelf(key).entries:
            return
        copy = world.copy(host.name, disk)
        for_s = min(rng.uniform(5.0, 60.0), HEAL_S - world.loop.time())
        world.loop.outside(world.loop.time() + max(for_s, 0.1), lambda: world.scrap(copy))

    def _rot(self) -> None:
        """A byte of a backup changes."""
        rng, hosts = self.world.rng, self.world.hosts
        stored = rng.choice(list(hosts.values())).backups.complete
        if stored:
            rotten = rng.choice(list(stored))
            stored[rotten].rotten = True
            self.world.observer.note("rot", rotten)

    def _guest(self, *, halt: bool) -> None:
        guests = [
            (host, uid)
            for host in self.world.hosts.values()
            for uid, domain in host.domains.items()
            if domain.active
        ]
        if guests:
            host, uid = self.world.rng.choice(guests)
            if halt:
                host.halt_guest(uid)
            else:
                host.crash_guest(uid)

    def _clock(self) -> None:
        self._some().skew_ns = int(self.world.rng.uniform(-3600, 3600) * 1e9)

    # --- end ------------------------------------------------------------------------------
    def heal(self) -> None:
        """End all faults; stopped parts return within seconds."""
        world = self.world
        world.observer.note("healed")
        world.server.weather = type(world.server.weather)()
        world.server.fill()
        world.server.free()
        for host in world.hosts.values():
            host.free()
            deaf = host.temper.deaf
            host.temper = type(host.temper)(deaf=deaf)
        for service in world.services.values():
            if service.link is not None:
                service.link.join()
