"""nats-servers of a run: one or three on loopback, synced by default or always; one user.

Permissions have tests of their own. Here every role logs in as the same user, so a run needs no
server configuration for two hundred nodes.
"""

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.load.services import DIES_WITH_US

from virtbus.bus.client import probes
from virtbus.bus.provisioning.server import binary
from virtbus.bus.runtime.bus_settings import BusSettings

USER, PASSWORD = "load", "load"
READY_S = 20.0
CONFIG = """\
server_name: "load-{index}"
listen: "127.0.0.1:{port}"
http: "127.0.0.1:{monitor}"
max_payload: 1MB
ping_interval: 10s
write_deadline: 5s
feature_flags {{ js_ack_fc_v2: false }}
jetstream {{
  store_dir: "{store}"
  {sync}
  strict: true
  max_memory_store: 256MB
  max_file_store: 8GB
}}
authorization {{ users: [ {{ user: "{user}", password: "{password}" }} ] }}
"""
CLUSTER = 'cluster {{ name: "load", listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'


@dataclass(frozen=True)
class Servers:
    """Running servers, and the folder with the credentials for all clients."""

    processes: tuple["subprocess.Popen[bytes]", ...]
    ports: tuple[int, ...]
    monitors: tuple[int, ...]
    run_dir: Path

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.ports)

    @property
    def replicas(self) -> int:
        return len(self.processes)

    def add(self, *users: str) -> None:
        """Write the credentials files that services look for: `<user>.creds`."""
        for user in users:
            node = user.removeprefix("node-") if user.startswith("node-") else ""
            content = {
                "url": self.url,
                "user": USER,
                "password": PASSWORD,
                "inbox_prefix": f"_INBOX_{node or user}",
                "node": node,
            }
            (self.run_dir / f"{user}.creds").write_text(json.dumps(content))

    def settings(self, user: str = "admin") -> BusSettings:
        return BusSettings(creds=self.run_dir / f"{user}.creds")

    def monitored(self) -> dict[str, int]:
        """Return messages and bytes that clients sent and received, over all servers."""
        total = dict.fromkeys(("in_msgs", "out_msgs", "in_bytes", "out_bytes"), 0)
        for port in self.monitors:
            for connection in _get(port, "connz?limit=2048&state=any")["connections"]:
                for name in total:
                    total[name] += int(connection.get(name, 0))
        return total


def _get(port: int, path: str) -> Any:
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        return json.load(answer)


def free_ports(count: int) -> list[int]:
    """Return different ports without a listener."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def _started(folder: Path, index: int, config: str) -> Any:
    place = folder / f"nats-{index}"
    place.mkdir()
    (place / "server.conf").write_text(config)
    with (place / "server.log").open("wb") as log:
        argv = [*DIES_WITH_US, str(binary()), "-c", str(place / "server.conf")]
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


@asynccontextmanager
async def serving(folder: Path, *, replicas: int, sync: str) -> AsyncIterator[Servers]:
    """Run `replicas` servers below `folder`; `sync` is `always` or `default`."""
    run_dir = folder / "run"
    run_dir.mkdir()
    ports, monitors, routes = (free_ports(3 * replicas)[i::3] for i in range(3))
    with ExitStack() as stack:
        processes = []
        for index in range(replicas):
            config = CONFIG.format(
                index=index,
                port=ports[index],
                monitor=monitors[index],
                store=folder / f"nats-{index}",
                sync="sync_interval: always" if sync == "always" else "",
                user=USER,
                password=PASSWORD,
            )
            if replicas > 1:
                peers = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
                config += CLUSTER.format(port=routes[index], routes=peers)
            processes.append(stack.enter_context(_started(folder, index, config)))
        servers = Servers(tuple(processes), tuple(ports), tuple(monitors), run_dir)
        servers.add("admin", "controller", "client")
        async with asyncio.timeout(READY_S):
            for port in ports:
                while not await probes.logs_in("127.0.0.1", port, USER, PASSWORD):
                    await asyncio.sleep(0.05)
        yield servers


def names(prefix: str, count: int) -> Sequence[str]:
    """Return the ids that `virtbus.simulator` gives its nodes."""
    return [f"{prefix}-{number:03d}" for number in range(count)]
