"""Kills processes and servers of a fleet by a seed, and reports each kill."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from tests.hosts.fleet import Fleet, Member

from virtbus.bus.errors import BusError
from virtbus.schemas.api import BusStatus
from virtbus.schemas.errors import VirtbusError

OF_A_HOST = ("imaged", "netd", "nodeagent", "up", "libvirtd")
OF_A_SERVER = ("controller", "nats-server", "up")
PAUSE_S = (1.0, 4.0)
LOOK_S = 1.0
BLOWS = 2
TOLD_S = 5.0
"""A node's report of its services is at most as old as a heartbeat, 4 s."""
DARK_S = 6.0
"""Seconds for which a server of the bus has no power."""


class Killer:
    """One kill after the other, on parts that can bear it, on a machine of any speed.

    A server is killed while all are up: three tolerate one that is down. A host is killed once
    more while it recovers, and then only after it was ready again.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._struck: dict[str, list[float]] = {name: [] for name in fleet.hosts}
        """The times of the kills of each host since it was last ready."""
        self._random = random.Random(seed)
        self._over = threading.Event()
        self.blows: list[str] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Kill until `end`."""
        try:
            while not self._over.wait(self._random.uniform(*PAUSE_S)):
                self._strike()
        except BaseException as error:  # noqa: BLE001  told by the test that waits for us
            self.failure = error

    def _strike(self) -> None:
        kind = self._random.choices(("host", "server", "power"), (6, 3, 1))[0]
        if kind != "host" and not self._servers_whole():
            return
        blows: dict[str, Callable[[], None]] = {
            "host": self._strike_host,
            "server": lambda: self._kill(self._of(self._fleet.servers), OF_A_SERVER),
            "power": self._cut_power,
        }
        blows[kind]()

    def _servers_whole(self) -> bool:
        """Return True once every stream has all its copies up to date; False after the end."""
        while not self._over.wait(LOOK_S):
            with suppress(BusError, VirtbusError):
                told = BusStatus.model_validate(self._fleet.ask("bus.status", timeout_s=3))
                if told.servers_current == len(self._fleet.servers):
                    return True
        return False

    def _strike_host(self) -> None:
        self._note_whole()
        name = self._random.choice(sorted(self._fleet.hosts))
        if len(self._struck[name]) < BLOWS:
            self._struck[name].append(time.monotonic())
            self._kill(self._fleet.hosts[name], OF_A_HOST)

    def _note_whole(self) -> None:
        """Forget the kills of hosts that have reported themselves ready since."""
        with suppress(BusError, VirtbusError):
            for name in self._fleet.whole():
                struck = self._struck[name]
                if struck and time.monotonic() - struck[-1] > TOLD_S:
                    struck.clear()

    def _of(self, members: Mapping[str, Member]) -> Member:
        return members[self._random.choice(sorted(members))]

    def _kill(self, member: Member, services: tuple[str, ...]) -> None:
        service = self._random.choice(services)
        pid = member.pids().get(service)
        if pid is not None:
            self.blows.append(f"kill -9 {service} of {member.name}")
            member.box.kill(pid)
            if service == "libvirtd":
                _end_probes(member)

    def _cut_power(self) -> None:
        name = self._random.choice(sorted(self._fleet.servers))
        self.blows.append(f"power off {name} for {DARK_S:g} s")
        server = self._fleet.servers[name]
        server.off()
        self._over.wait(DARK_S)
        server.on()

    def end(self) -> None:
        """Stop killing."""
        self._over.set()


@contextmanager
def killing(fleet: Fleet, seed: int) -> Iterator[Killer]:
    """Kill while the context is open; all killed parts are up again at its end."""
    killer = Killer(fleet, seed)
    thread = threading.Thread(target=killer.run, name="killer")
    thread.start()
    try:
        yield killer
    finally:
        killer.end()
        thread.join()
    if killer.failure is not None:
        raise killer.failure


def _end_probes(member: Member) -> None:
    """End the emulator that a killed libvirtd asked for its capabilities.

    libvirt starts it as a daemon, and no later libvirtd knows of it. The next libvirtd takes a
    second to its first question, so this ends no emulator of that one.
    """
    for pid, argv in member.box.processes().items():
        if "none" in [one.partition(",")[0] for one in argv] and any(
            "/qmp-" in one for one in argv
        ):
            member.box.kill(pid)
