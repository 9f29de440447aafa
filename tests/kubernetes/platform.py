"""virtbus next to a test cluster: nats-server, controller, simulated nodes, the bridge.

All are processes of their own, which tests may kill and start again.
"""

import asyncio
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.kubernetes.cluster import Cluster, Json, Program
from tests.kubernetes.installed import installed
from tests.load.servers import CONFIG, PASSWORD, USER, free_ports, names
from tests.load.services import Service, running
from tests.load.world import PREFIX, nodes_ready

from virtbus.bus.client import probes
from virtbus.bus.client.connection import connect
from virtbus.bus.provisioning.server import binary
from virtbus.bus.provisioning.stream_setup import ensure, ensure_node
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.documents.manifests import NAMESPACE
from virtbus.schemas.subjects import api
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode

READY_S = 60.0
SMOKE = Path(__file__).parents[2] / "services/kubebridge/tests/kubevirt-smoke-fedora.yaml"

T = TypeVar("T")


class Platform:
    """The running parts. All methods block.

    `kubeconfig` and `at` belong to the bridge: its rights, and its port.
    """

    def __init__(self, cluster: Cluster, kubeconfig: Path, at: int, nodes: int = 3) -> None:
        self.cluster = cluster
        self._kubeconfig = kubeconfig
        self.at = at
        self.folder = Path(tempfile.mkdtemp(prefix="virtbus-bridge-", dir="/var/tmp"))
        (self.folder / "run").mkdir()
        self._nodes = names(PREFIX, nodes)
        self.nats = self._nats()
        self.controller = Service("controller", "virtbus.controller", self.folder)
        argv = ("--node", PREFIX, "--first", "0", "--count", str(nodes))
        self.simulated = Service("simulated", "virtbus.simulator", self.folder, *argv)
        self.bridge = self.another("bridge", at)

    def another(self, name: str, at: int = 0) -> Service:
        """Make a bridge, not started yet, at a port (0: any)."""
        login = ("--kubeconfig", str(self._kubeconfig), "--namespace", NAMESPACE)
        listen = ("--listen", f"127.0.0.1:{at}")
        return Service(name, "virtbus.kubebridge", self.folder, *login, *listen)

    @contextmanager
    def running(self, *, bridge: bool = True) -> Iterator[None]:
        """Run all parts until they are ready; or all except the bridge."""
        services = [self.controller, self.simulated, *([self.bridge] if bridge else [])]
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder)
            self.nats.start()
            stack.callback(self.nats.stop)
            run(self._declared())
            stack.enter_context(running(*services))
            for service in services:
                run(service.ready())
            run(self._nodes_ready())
            yield

    # --- bus ------------------------------------------------------------------------------
    def _nats(self) -> Program:
        self.port, monitor = free_ports(2)
        config = CONFIG.format(
            index=0,
            port=self.port,
            monitor=monitor,
            store=self.folder / "nats",
            sync="",
            user=USER,
            password=PASSWORD,
        )
        path = self.folder / "nats.conf"
        path.write_text(config)
        for user in (
            "admin",
            "controller",
            "client",
            "bridge",
            *map("node-{}".format, self._nodes),
        ):
            node = user.removeprefix("node-") if user.startswith("node-") else ""
            creds = {
                "url": f"nats://127.0.0.1:{self.port}",
                "user": USER,
                "password": PASSWORD,
                "inbox_prefix": f"_INBOX_{node or user}",
                "node": node,
            }
            (self.folder / "run" / f"{user}.creds").write_text(json.dumps(creds))
        return Program([str(binary()), "-c", str(path)], self.folder / "nats.log")

    async def _declared(self) -> None:
        await self.bus_ready()
        async with self.connected("admin") as admin:
            await ensure(admin)
            nonce = encode(JoinNonce(nonce=secrets.token_hex(16)))
            for node in self._nodes:
                await ensure_node(admin, node, nonce)

    async def bus_ready(self) -> None:
        """Wait until the server accepts logins."""
        async with asyncio.timeout(READY_S):
            while not await probes.logs_in("127.0.0.1", self.port, USER, PASSWORD):
                await asyncio.sleep(0.05)

    async def _nodes_ready(self) -> None:
        async with self.connected("client") as client:
            await nodes_ready(client, len(self._nodes))

    def connected(self, user: str) -> Any:
        """Return a context with a connection to the bus."""
        creds = self.folder / "run" / f"{user}.creds"
        return connect(BusSettings(creds=creds), name=f"test {user}")

    def ask(self, verb: str, resource: str = "vm", **data: Any) -> Any:
        """Send a request to virtbus as a client; return the answer."""

        async def asked() -> Any:
            async with self.connected("client") as client:
                return await client.request(api(resource, verb), data, timeout_s=20)

        return run(asked())

    def vms(self, namespace: str) -> dict[str, Json]:
        """Return the VMs of the bus in a namespace, by name."""
        found: dict[str, Json] = {}
        data: Json = {"namespace": namespace, "limit": 500}
        while True:
            page = self.ask("list", **data)
            found |= {one["name"]: one for one in page.get("items", ())}
            if not page.get("continue"):
                return found
            data["continue"] = page["continue"]

    def missing_rights(self) -> list[str]:
        """Return the actions that the bridge was forbidden, from its log."""
        return [line for line in self.bridge.complaints() if "is forbidden" in line]

    # --- Kubernetes -----------------------------------------------------------------------
    def apply(self, namespace: str, *manifests: Json) -> str:
        """Run kubectl apply."""
        whole = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        return self.cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(whole))

    def find(self, namespace: str, kind: str, name: str) -> Json | None:
        """Return the object, or None."""
        done = self.cluster.try_kubectl("get", kind, name, "-n", namespace, "-o", "json")
        if done.returncode:
            assert "NotFound" in done.stderr, done.stderr
            return None
        found: Json = json.loads(done.stdout)
        return found

    def ready(self, namespace: str, name: str) -> None:
        """Run `kubectl wait --for=condition=Ready` for the VM."""
        argv = ("--for=condition=Ready", f"vm/{name}", "--timeout=30s")
        self.cluster.kubectl("wait", "-n", namespace, *argv)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own."""
    return asyncio.run(work)


def until(what: str, holds: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Wait until the condition is true; a failure names it."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, f"after {timeout_s:g} s: {what}"
        time.sleep(0.05)


@contextmanager
def bridged(cluster: Cluster, nodes: int = 3) -> Iterator[Platform]:
    """A cluster with deploy/kubernetes as users apply it, and virtbus next to it.

    The bridge has only the rights of its service account, so a missing right fails a test. (An
    API server that has just started refuses everybody except its masters for a moment.) There
    are no webhooks, because bridges are killed here, and objects were never reviewed.
    """
    (at,) = free_ports(1)
    with installed(cluster, at, webhooks=False) as kubeconfig:
        platform = Platform(cluster, kubeconfig, at, nodes)
        with platform.running():
            yield platform
