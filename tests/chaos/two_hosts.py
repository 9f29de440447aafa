"""Two hosts, each behind a link of its own to one bus; virtbus runs on them as on machines."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.chaos.field import BUS_DISK_BYTES
from tests.chaos.link import Link
from tests.e2e import host as machine
from tests.hosts.box import GATEWAY, NETWORK, Box, Boxes, boxes
from tests.hosts.fleet import PORT, SEED, STATE, Fleet, Host, Server, powered, prepare

NODES = ("n1", "n2")
BUS = f"{NETWORK}.201"
DAEMONS = ("libvirtd", "virtlogd")
"""The programs of a host that are not ours."""


class SmallServer(Server):
    """The bus on a small disk of its own. `environ`: more settings of its controller."""

    def __init__(self, box: Box, argv: list[str], environ: Mapping[str, str]) -> None:
        super().__init__(box, argv)
        self._environ = dict(environ)

    def on(self) -> None:
        self.box.on()
        self.box.run("mkdir", "-p", str(STATE / "nats"))
        size = f"size={BUS_DISK_BYTES}"
        self.box.run("mount", "-t", "tmpfs", "-o", size, "chaos", str(STATE / "nats"))
        self.start()

    def start(self, *, python: str = sys.executable) -> None:
        argv = (python, "-m", "virtbus.cli", *self._argv)
        self.box.keep("up", *argv, environ=self._environ)


class Node:
    """A host, and what strikes can hit from there: its services, its link and the bus."""

    def __init__(self, host: Host, server: Server, link: Link) -> None:
        self._host = host
        self._server = server
        self.name = host.name
        self.link = link

    def pids(self) -> dict[str, int]:
        """Return our processes, by name."""
        return self._server.pids() | self._own()

    def _own(self) -> dict[str, int]:
        found = self._host.pids()
        return {name: pid for name, pid in found.items() if name not in DAEMONS}

    def kill_node(self) -> None:
        """Kill all our processes on the host at once; they are not started again."""
        self._host.box.unkeep("up")
        for pid in self._own().values():
            self._host.box.kill(pid)

    def start_node(self) -> None:
        """Start them; the node becomes ready a moment later."""
        self._host.start()


class TwoHosts(Fleet):
    """Two hosts and a server of the bus. `struck` has the places of strikes."""

    simulate = False

    def __init__(self, held: Boxes, environ: Mapping[str, str], links: Mapping[str, Link]) -> None:
        self._links = links
        super().__init__(held, len(NODES), 1, environ)
        (first,) = self.servers.values()
        self.server = self.servers[first.name] = SmallServer(first.box, first._argv, environ)
        self.struck: Sequence[Node] = [
            Node(host, self.server, links[host.name]) for host in self.hosts.values()
        ]

    def _node_argv(self, name: str) -> list[str]:
        creds = str(self._creds / f"node-{name}.creds")
        return [
            "node",
            "up",
            "--nats",
            f"nats://{GATEWAY}:{self._links[name].port}",
            "--creds",
            creds,
        ]

    @property
    def store(self) -> Path:
        """Return the folder of the bus' disk."""
        return self.server.box.path(STATE / "nats")


@contextmanager
def two_hosts(environ: Mapping[str, str], seed: int) -> Iterator[TwoHosts]:
    """Both hosts, ready. `environ`: more settings of all services."""
    machine.refuse_the_machines_own_network()
    prepare()
    with boxes(SEED) as held, ExitStack() as at_end:
        links = {}
        for at, name in enumerate(NODES):
            links[name] = Link((BUS, PORT), seed + at, listen="0.0.0.0")
            at_end.callback(links[name].close)
        made = TwoHosts(held, environ, links)
        with powered(made):
            yield made
