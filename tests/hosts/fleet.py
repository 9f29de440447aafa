"""Hosts with a libvirtd of their own and servers of the bus, all on this machine.

    with fleet(hosts=3, servers=3) as platform:
        platform.create("web")
        platform.hosts["n1"].kill("netd")

A host runs `virtbus node up`, a server box `virtbus up --no-node`: a NATS server and a controller.
Needs root in a network namespace of its own (`tools/in-host-netns`). Boxes and their files are
gone at the end, also when this process is killed.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests import census
from tests.e2e import host as machine
from tests.e2e.platform import GONE_S, Json, _accelerator, lasts, standing, tiny_image, until
from tests.hosts.box import ROOT, Box, Boxes, boxes

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.netd.edge.wrapper_install import install
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState, NodeView

SEED = ROOT / "build-out" / "hosts"
"""Data that outlives a fleet: the wrapper, libvirt's cache about the emulator, the guest's
image.
"""
STATE, RUN = Path("/var/lib/virtbus"), Path("/run/virtbus")
LEAST_MEMORY = "96MiB"
"""The guest `tiny` boots with 80 MiB. With 72 MiB its kernel panics, because no memory is left.
Such a guest reboots until its end, and needs a CPU for that.
"""
ROUTE_PORT, PORT = 6222, 4222
READY_S = 120.0
SWEPT_S = 180.0
"""Remains of a killed controller are orphans after a minute, and gone two sweeps later."""
PROGRAMS = ("libvirtd", "virtlogd", "nats-server")
CAPABILITIES = Path("var/cache/libvirt/qemu/capabilities")


def _parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


class Member:
    """A box with services of virtbus in it."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.name = box.name

    def pids(self) -> dict[str, int]:
        """Return the running services by name: services, `up`, nats-server, libvirtd, virtlogd."""
        found = {}
        processes = self.box.processes()
        for pid, argv in processes.items():
            if processes.get(_parent_of(pid)) == argv:
                continue  # a child has its parent's command line until its exec
            program = Path(argv[0]).name
            if program in PROGRAMS:
                found[program] = pid
            elif argv[1:2] == ["-m"] and argv[2:] and argv[2].startswith("virtbus."):
                found["up" if argv[2] == "virtbus.cli" else argv[2].removeprefix("virtbus.")] = pid
        return found

    def kill(self, service: str) -> int:
        """Kill with SIGKILL; return the dead pid."""
        pid: int = until(lambda: self.pids().get(service), f"{service} runs on {self.name}")
        self.box.kill(pid)
        return pid

    def off(self) -> None:
        """Cut the power."""
        self.box.off()

    def log(self) -> str:
        """Return the output of `up`."""
        return (self.box.base / "up.log").read_text(errors="replace")


class Host(Member):
    """A host of VMs."""

    def __init__(self, box: Box, environ: Mapping[str, str], argv: list[str]) -> None:
        super().__init__(box)
        self._environ = dict(environ)
        self._argv = argv
        self.quiet: list[str] = []

    def on(self) -> None:
        """Power on; libvirtd and the node's services start."""
        self.lay_out()
        self.box.on()
        self.box.keep("virtlogd", "virtlogd")
        self.box.keep("libvirtd", "tini", "-s", "--", "libvirtd")
        until(self.libvirt_answers, f"libvirtd of {self.name}")
        self.start()

    def start(self, *, python: str = sys.executable) -> None:
        """Run `virtbus node up`, with another interpreter's virtbus if one is named."""
        argv = (python, "-m", "virtbus.cli", *self._argv)
        self.box.keep("up", *argv, environ=self._environ)

    def libvirt_answers(self) -> bool:
        """Return True if libvirtd answers calls."""
        asked = self.box.popen("virsh", "-q", "-c", "qemu:///system", "uri")
        return asked.wait(60) == 0

    def lay_out(self) -> None:
        """Make the disk of a host that was never on."""
        disk = self.box.base / "disk"
        if disk.exists():
            return
        etc = disk / "etc/libvirt"
        etc.mkdir(parents=True)
        for file in Path("/etc/libvirt").glob("*.conf"):
            shutil.copy2(file, etc)
        for folder in ("var/lib/libvirt/qemu", "var/lib/libvirt/boot", str(CAPABILITIES)):
            (disk / folder).mkdir(parents=True)
        for known in (SEED / CAPABILITIES.name).glob("*.xml"):
            shutil.copy2(known, disk / CAPABILITIES)

    def keep_capabilities(self) -> None:
        """Give this libvirtd's cache to the next fleet's libvirtds."""
        (SEED / CAPABILITIES.name).mkdir(exist_ok=True)
        for known in (self.box.base / "disk" / CAPABILITIES).glob("*.xml"):
            shutil.copy2(known, SEED / CAPABILITIES.name)

    def census(self) -> list[str]:
        """Return the objects on this host, one line each."""
        told = self.box.run("python3", str(ROOT / "tools/census"))
        return [line for line in told.splitlines() if not line.startswith(_NOT_OF_VMS)]

    def emulators(self) -> dict[int, str]:
        """Return the QEMUs of VMs: pid and uid."""
        found = {}
        for pid, argv in self.box.processes().items():
            if machine.is_qemu(argv) and "-uuid" in argv:
                uids = [argv[at + 1] for at, word in enumerate(argv[:-1]) if word == "-uuid"]
                found[pid] = uids[0]
        return found


# objects that belong to the services themselves, not to VMs
_NOT_OF_VMS = ("process virtbus", "process python", "process nsenter", "socket /run/virtbus/netd")


class Server(Member):
    """A server of the bus, with a controller."""

    def __init__(self, box: Box, argv: list[str]) -> None:
        super().__init__(box)
        self._argv = argv

    def on(self) -> None:
        self.box.on()
        self.start()

    def start(self, *, python: str = sys.executable) -> None:
        """Run `virtbus up --no-node`."""
        self.box.keep("up", python, "-m", "virtbus.cli", *self._argv)


class Fleet:
    """The whole fleet, with methods to use, break and inspect it. All methods block."""

    def __init__(self, held: Boxes, hosts: int, servers: int, environ: Mapping[str, str]) -> None:
        self.base = held.base
        self._creds = self.base / "creds"
        nodes = [f"n{number}" for number in range(1, hosts + 1)]
        self.servers = {
            f"b{number}": Server(
                Box(held, f"b{number}", 200 + number), _server_argv(number, servers, nodes)
            )
            for number in range(1, servers + 1)
        }
        self.urls = ",".join(f"nats://{one.box.address}:{PORT}" for one in self.servers.values())
        own = {
            "VIRTBUS_WRAPPER_DIR": str(STATE / "libexec"),
            "VIRTBUS_WRAPPER": str(STATE / "libexec/vmwrapper"),
            "VIRTBUS_BRIDGE_LINGER_S": "0.2",
            "VIRTBUS_ACCELERATOR": _accelerator(),
            **environ,
        }
        self.hosts = {
            name: Host(Box(held, name, number), own, self._node_argv(name))
            for number, name in enumerate(nodes, 1)
        }
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("VIRTBUS_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTBUS_CREDS": str(self._creds / "bus.creds"),
            "VIRTBUS_SERVER": self.urls,
        }
        self.uids: set[str] = set()

    def _node_argv(self, name: str) -> list[str]:
        creds = str(self._creds / f"node-{name}.creds")
        return ["node", "up", "--nats", self.urls, "--creds", creds]

    # --- lifecycle ------------------------------------------------------------------------
    def start(self) -> None:
        """Power everything on and wait until it is ready."""
        self._creds.mkdir()
        self._start_servers()
        with ThreadPoolExecutor() as at_once:
            list(at_once.map(Host.on, self.hosts.values()))
        self.wait_whole(within_s=READY_S)
        if self.hosts:
            # placement prefers hosts with a cached image: all should be alike
            self.ask("image.pull", {"ref": "tiny"}, timeout_s=120)
            until(
                lambda: all(n.get("images") for n in self.ask("node.list")["items"]),
                "nodes tell of their image",
            )
        for host in self.hosts.values():
            host.quiet = host.census()
            host.keep_capabilities()

    def _start_servers(self) -> None:
        """Power the bus on; all servers use the first server's passwords."""
        first, *others = self.servers.values()
        first.on()
        passwords = first.box.path(STATE / "bus-passwords.json")
        until(passwords.exists, f"{first.name}'s passwords")
        for server in others:
            place = server.box.base / "disk" / str(STATE).lstrip("/")
            place.mkdir(parents=True)
            shutil.copy2(passwords, place)
            server.on()
        for server in self.servers.values():
            until(server.box.path(RUN / "bus.creds").exists, f"{server.name}'s credentials")
        for file in first.box.path(RUN).glob("*.creds"):
            shutil.copy(file, self._creds)

    def wait_whole(self, within_s: float = READY_S) -> None:
        """Return once the API answers and every service of every node is ready."""

        def whole() -> bool:
            with suppress(BusError, VirtbusError):
                return self.whole() == set(self.hosts)
            return False

        until(whole, lambda: f"every node ready, but {self.ask('node.list')}", within_s=within_s)

    def whole(self) -> set[str]:
        """Return the nodes with all services ready; raise if nobody answers."""
        page = NodePage.model_validate(self.ask("node.list", timeout_s=3))
        return {node.node for node in page.items if _whole(node)}

    # --- use ------------------------------------------------------------------------------
    @asynccontextmanager
    async def bus(self, user: str = "client") -> AsyncIterator[NatsBus]:
        """Connect to any server, in a role."""
        file = "bus" if user == "client" else user
        settings = BusSettings(url=self.urls, creds=self._creds / f"{file}.creds")
        async with connect(settings, name="test") as bus:
            yield bus

    def ask(self, verb: str, data: Json | None = None, *, timeout_s: float = 30) -> Any:
        """Send one request to `virtbus.api.v1.<verb>`, in a connection of its own."""

        async def asked() -> Any:
            async with self.bus() as bus:
                return await bus.request(f"virtbus.api.v1.{verb}", data or {}, timeout_s=timeout_s)

        return asyncio.run(asked())

    def try_cli(self, *argv: str, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
        """Run `virtbus ARGV…` and return it after any exit code."""
        return subprocess.run(
            ["virtbus", *argv],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def cli(self, *argv: str, timeout_s: float = 200) -> str:
        """Return the output of `virtbus ARGV…`."""
        done = self.try_cli(*argv, timeout_s=timeout_s)
        assert done.returncode == 0, f"virtbus {' '.join(argv)}: {done.returncode}\n{done.stderr}"
        return done.stdout

    def create(self, name: str, *argv: str, wait: str = "running") -> Json:
        """Create a VM of the image tiny; return its view once it is `wait` (empty: accepted)."""
        uid = uuid7()
        self.uids.add(uid)
        waiting = ("--wait", wait) if wait else ()
        text = self.cli(
            *("vm", "create", name, "--uid", uid, "--image", "tiny", "--memory", "128MiB"),
            *(*argv, *waiting, "-o", "json"),
        )
        view: Json = json.loads(text)
        return view

    def vms(self) -> list[Json]:
        """Return all VMs."""
        items: list[Json] = self.ask("vm.list", {"limit": 500}).get("items", [])
        return items

    # --- inspection -----------------------------------------------------------------------
    def nothing_left(self, within_s: float = GONE_S) -> None:
        """Delete all VMs and wait until the hosts are as before and the bus has no VM."""
        names = [(vm["namespace"], vm["name"]) for vm in self.vms()]
        for namespace, name in names:
            self.cli("vm", "delete", name, "-n", namespace, "--grace", "0", "--no-wait")
        until(lambda: not self.vms(), "all VMs deleted", within_s=within_s)
        changed: list[str] = []

        def quiet() -> bool:
            changed[:] = [
                f"{host.name}: {line}"
                for host in self.hosts.values()
                for line in census.diff(host.quiet, host.census())
            ] + asyncio.run(self._keys())
            return not changed

        until(
            quiet,
            lambda: "\n".join(["nothing of a VM, but", *changed]),
            within_s=max(within_s, SWEPT_S),
        )

    def keep_logs(self) -> None:
        """Copy every log to the folder in VIRTBUS_E2E_KEEP."""
        folder = os.environ.get("VIRTBUS_E2E_KEEP")
        if folder:
            for log in self.base.glob("*/*.log"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                shutil.copy(log, Path(folder, f"{log.parent.name}-{log.name}"))

    async def _keys(self) -> list[str]:
        """Return the keys of VMs on the bus."""
        async with self.bus("admin") as admin:
            found = [await standing(admin, f"$KV.{bucket}.>") for bucket in ("vm", "sec", "st")]
        return [key for held in found for key, value in held.items() if not lasts(key, value)]


def _whole(node: NodeView) -> bool:
    ready = all(service.state is NodeState.READY for service in node.services.values())
    return ready and node.state is NodeState.READY and node.age_s < 10


def _server_argv(number: int, servers: int, nodes: list[str]) -> list[str]:
    address = f"10.200.0.{200 + number}"
    argv = ["up", "--no-node", "--listen", address, "--nodes", ",".join(nodes)]
    if servers == 1:
        return argv
    routes = ",".join(f"10.200.0.{200 + one}:{ROUTE_PORT}" for one in range(1, servers + 1))
    return [*argv, "--cluster", f"{address}:{ROUTE_PORT}", "--routes", routes]


def prepare() -> None:
    """Make the shared parts of fleets: the wrapper once, so that libvirt probes QEMU once."""
    sources = SEED / "images/src"
    sources.mkdir(parents=True, exist_ok=True)
    image = tiny_image()
    kept = sources / "tiny.qcow2"
    if not kept.exists() or kept.stat().st_mtime < image.stat().st_mtime:
        shutil.copy(image, kept)
    install(SEED / "libexec", RUN / "netd" / "wrapper.sock")


@contextmanager
def fleet(
    *, hosts: int = 3, servers: int = 3, environ: Mapping[str, str] | None = None
) -> Iterator[Fleet]:
    """A whole fleet, ready. `environ`: more settings of every node's services."""
    machine.refuse_the_machines_own_network()
    prepare()
    with boxes(SEED) as held:
        made = Fleet(held, hosts, servers, environ or {})
        with powered(made):
            yield made


@contextmanager
def powered(made: Fleet) -> Iterator[None]:
    """Start a fleet, and cut the power of all its boxes at the end."""
    try:
        made.start()
        yield
    finally:
        made.keep_logs()
        for member in (*made.hosts.values(), *made.servers.values()):
            with suppress(AssertionError):
                member.box.off()
