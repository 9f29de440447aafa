"""A whole virtbus under test: `virtbus up` with folders of its own, as a user would run it."""

import asyncio
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests import census
from tests.e2e import host

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError, OutcomeUnknownError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.cli.vm.logs import Visible
from virtbus.nodeagent.edge.kvm_probe import usable
from virtbus.schemas.api import NodePage, VmPage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import NodeSpec, NodeState
from virtbus.schemas.subjects import (
    HOST_KEY,
    HOSTS_KEY,
    IMAGES_KEY,
    INSTANCE_KEY,
    JOIN_KEY,
    NODE_SPEC_KEY,
    PEER_KEY,
    POOLS_KEY,
    RIVAL_KEY,
    SIGNING,
)
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import read

NODE = "e2e"
POOL, DEVICE_POOL = "second", "raw"
POOLS = f"""[pools.{POOL}]
kind = "local"
mount = false
[pools.{DEVICE_POOL}]
kind = "block"
volumes = {{ "default.raw" = "DEVICE" }}
"""
"""Pools next to `local`: on the same disk, and on a device, which tests make."""
HALT = "halt"
"""A guest that is running at once and costs no CPU, for tests that never talk to it."""
_HALTS = (b"\xfa\xf4\xeb\xfd").ljust(510, b"\0") + b"\x55\xaa"
"""A boot sector: cli; hlt; jmp."""
BRIDGE = "virtbus0"
LINKS = ("br-e2e", "wan-e2e")
"""A bridge and an interface of the host that networks may name, once a test has made them."""
QEMU = Path("/usr/bin/qemu-system-x86_64")
SERVICES = ("controller", "imaged", "netd", "nodeagent")
LOG_BYTES = 65_536
"""The end of a console's log that `virtbus vm logs` prints."""
READY_S = 200.0
"""Seconds on an idle machine; with ten others for each CPU, more than a minute."""
GONE_S = 60.0
"""Within this, everything of a VM must have left the host (I5)."""
_ADDRESS = re.compile(r"^\d+\.\d+\.\d+\.\d+$")

Json = dict[str, Any]


def tiny_image() -> Path:
    """The default guest, which `make setup` builds."""
    return Path(os.environ.get("VIRTBUS_TINY", "/var/lib/virtbus/images/src/tiny.qcow2"))


@functools.cache
def _accelerator() -> str:
    """The cached result of the agent's KVM probe: if KVM hangs, a probe takes seconds."""
    return "auto" if asyncio.run(usable(QEMU)) else "tcg"


def until(
    condition: Callable[[], Any], what: str | Callable[[], str], *, within_s: float = 60.0
) -> Any:
    """Return the first true value of `condition`, checked ten times a second."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            msg = f"not within {within_s:g} s: {what if isinstance(what, str) else what()}"
            raise AssertionError(msg)
        time.sleep(0.1)


class Refused(AssertionError):  # noqa: N818  what a refusal is called everywhere else
    """A command that ended with an error; `error` is its `-o json` output."""

    def __init__(self, argv: tuple[str, ...], done: "subprocess.CompletedProcess[str]") -> None:
        super().__init__(f"virtbus {' '.join(argv)}: exit {done.returncode}\n{done.stderr}")
        self.exit_code = done.returncode
        self.text = done.stdout + done.stderr
        self.error: Json = {}
        with suppress(ValueError, KeyError):
            self.error = json.loads(done.stdout or done.stderr)["error"]


class Platform:
    """One `virtbus up`, with methods to use, break and inspect it. All methods block."""

    words: tuple[str, ...] = ("up",)
    """Return the command that runs it."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="virtbus-e2e-", dir="/var/tmp"))
        self.base.chmod(0o711)  # QEMU's user must be able to traverse it
        self.state_dir, self.run_dir = self.base / "state", self.base / "run"
        self.log = self.base / "up.log"
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("VIRTBUS_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTBUS_STATE_DIR": str(self.state_dir),
            "VIRTBUS_RUN_DIR": str(self.run_dir),
            "VIRTBUS_NODE": NODE,
            "VIRTBUS_BRIDGE_LINGER_S": "0.2",  # so that a census need not wait for the bridge
            "VIRTBUS_ACCELERATOR": _accelerator(),
            "VIRTBUS_DOWNLOAD_ADDRESS": "127.0.0.1:8480",
            "VIRTBUS_BACKUP_DIR": str(self.base / "backups"),
            "VIRTBUS_NETWORK_NAMESPACES": '{"*": ["*"]}',
            "VIRTBUS_LINKS_ALLOWED": json.dumps(LINKS),
            "VIRTBUS_DEVICES_ALLOWED": '["/dev/loop*"]',
            "VIRTBUS_DIRECTORIES_ALLOWED": json.dumps({str(self.base / "shared"): ["default"]}),
            "VIRTBUS_POOLS_FILE": str(self.base / "pools.toml"),
            "VIRTBUS_NAMES_DIR": str(self.base / "images.d"),
            "VIRTBUS_NAMES": json.dumps({HALT: f"file://{self.state_dir}/images/src/{HALT}"}),
            **(environ or {}),
        }
        self.device = Path("/dev", self.base.name)
        pools = POOLS.replace("DEVICE", str(self.device))
        (self.base / "pools.toml").write_text(pools, encoding="utf-8")
        (self.base / "backups").mkdir()
        (self.base / "shared").mkdir()
        (self.base / "images.d").mkdir()
        self._up: subprocess.Popen[bytes] | None = None
        self.uids: set[str] = set()
        self.at_end = ExitStack()
        """Undo a test's changes of the host for this platform, at its end."""
        self.quiet: list[str] = []
        """The census of this platform without VMs."""

    # --- lifecycle ------------------------------------------------------------------------
    def start(self, *, whole: bool = True) -> None:
        """Run `virtbus up` until every service is ready, or only until the API answers."""
        self.lay_out_images()
        said_before = self._times_up()
        with self.log.open("ab") as log:
            self._up = subprocess.Popen(
                ["virtbus", *self.words],
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if whole:
            until(self._ended_or(lambda: self._times_up() > said_before), "up", within_s=READY_S)
        else:
            until(self._ended_or(lambda: self.try_cli("vm", "list").returncode == 0), "the API")
        assert self._up.poll() is None, self.log.read_text()[-4000:]

    def lay_out_images(self) -> None:
        """Put both guests where imaged looks for images."""
        sources = self.state_dir / "images" / "src"
        if not sources.exists():
            sources.mkdir(parents=True)
            shutil.copy(tiny_image(), sources / "tiny.qcow2")
            (sources / HALT).write_bytes(_HALTS.ljust(2**20, b"\0"))

    def _times_up(self) -> int:
        return self.log.read_text().count("virtbus is up:") if self.log.exists() else 0

    def _ended_or(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: condition() or self.up.poll() is not None

    @property
    def up(self) -> "subprocess.Popen[bytes]":
        """The process of `virtbus up`."""
        assert self._up is not None, "not started"
        return self._up

    def stop(self) -> None:
        """Stop `virtbus up` as Ctrl-C does; VMs continue."""
        if self._up is not None and self._up.poll() is None:
            self._up.send_signal(signal.SIGCONT)
            self._up.terminate()
            try:
                self._up.wait(60)
            except subprocess.TimeoutExpired:
                self._kill_all()
                raise
        self._up = None

    def _kill_all(self) -> None:
        for pid in [*host.children(self.up.pid), self.up.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.up.wait(10)

    def wipe(self) -> None:
        """Remove everything in any state; for the end and for failures."""
        with suppress(subprocess.TimeoutExpired):
            self.stop()
        virsh = ("virsh", "-q", "-c", "qemu:///system")
        for name in host.domains_with_disks_below(self.state_dir):
            host.run(*virsh, "destroy", name, check=False)
            host.run(*virsh, "undefine", name, check=False)
        for uid in self.uids:
            host.run("ip", "netns", "delete", f"vb-{uid}", check=False)
        host.run("ip", "link", "delete", BRIDGE, check=False)
        host.run("nft", "delete", "table", "inet", "virtbus", check=False)
        for pid in host.resolvers(self.run_dir):
            with suppress(ProcessLookupError):  # it ends with its last guest
                os.kill(pid, signal.SIGKILL)
        self.at_end.close()
        layers = str(self.state_dir / "disks" / "layers")
        host.run("chattr", "-R", "-f", "-i", layers, check=False)  # ADR 0061
        shutil.rmtree(self.base, ignore_errors=True)

    # --- use ------------------------------------------------------------------------------
    def cli(
        self,
        *argv: str,
        input_text: str | None = None,
        timeout_s: float = 200,
    ) -> str:
        """Return the output of `virtbus ARGV…`; raise Refused if it ends with an error."""
        done = self.try_cli(*argv, input_text=input_text, timeout_s=timeout_s)
        if done.returncode != 0:
            raise Refused(argv, done)
        return done.stdout

    def try_cli(
        self, *argv: str, input_text: str | None = None, timeout_s: float = 200
    ) -> "subprocess.CompletedProcess[str]":
        """Run `virtbus ARGV…` and return it after any exit code."""
        return subprocess.run(
            ["virtbus", *argv],
            env=self.environ,
            input=input_text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start_cli(self, *argv: str) -> "subprocess.Popen[str]":
        """Start `virtbus ARGV…`; the caller must read its output and end it."""
        return subprocess.Popen(
            ["virtbus", *argv],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def create(self, name: str, *argv: str, wait: str = "running") -> Json:
        """Create a VM of tiny by the CLI; return its view once it is `wait` (empty: accepted)."""
        uid = uuid7()
        self.uids.add(uid)
        image = () if "--image" in argv or "-f" in argv else ("--image", "tiny")
        waiting = ("--wait", wait) if wait else ()
        small = () if "--memory" in argv or "-f" in argv else ("--memory", "128MiB")
        text = self.cli(
            "vm", "create", name, "--uid", uid, *image, *small, *argv, *waiting, "-o", "json"
        )
        view: Json = json.loads(text)
        return view

    def delete(self, *names: str, grace_s: int | None = 0) -> None:
        """Delete VMs and wait until they are gone."""
        grace = () if grace_s is None else ("--grace", str(grace_s))
        self.cli("vm", "delete", *names, *grace)

    def get(self, name: str) -> Json:
        """Return a VM, by a request of this process: the CLI takes ten times the CPU."""
        return VmView.model_validate(self._read("vm.get", {"name": name})).model_dump(mode="json")

    def pool(self, name: str) -> Json:
        """`virtbus pool get`; the state is empty until the node has reported the pool."""
        done = self.try_cli("pool", "get", name, "-o", "json")
        if done.returncode != 0:
            return {"state": "", "message": done.stderr}
        view: Json = {"message": "", **json.loads(done.stdout)["items"][0]}
        return view

    def vms(self) -> list[Json]:
        """Return all VMs, by a request of this process: the CLI takes ten times the CPU."""
        page = VmPage.model_validate(self._read("vm.list", {"limit": 500}))
        assert page.continue_ is None, "more than one page"
        return [view.model_dump(mode="json") for view in page.items]

    def ask(self, verb: str, data: Json | None = None, *, timeout_s: float = 30) -> Any:
        """Send one request to `virtbus.api.v1.<verb>`, in a connection of its own."""

        async def asked() -> Any:
            async with self.bus() as bus:
                return await bus.request(f"virtbus.api.v1.{verb}", data or {}, timeout_s=timeout_s)

        return asyncio.run(asked())

    def _read(self, verb: str, data: Json) -> Any:
        """Ask again after 3 s without an answer: a controller may have died with the request."""

        async def asked() -> Any:
            async with self.bus() as bus, asyncio.timeout(30):
                while True:
                    with suppress(OutcomeUnknownError):
                        return await bus.request(f"virtbus.api.v1.{verb}", data, timeout_s=3)

        return asyncio.run(asked())

    @asynccontextmanager
    async def bus(self, user: str = "client") -> AsyncIterator[NatsBus]:
        """Connect with the credentials that this platform printed, or those of a role."""
        settings = BusSettings.found(self.run_dir, user)
        async with connect(settings, name="test") as bus:
            yield bus

    def wait_state(self, name: str, *states: str, within_s: float = 60) -> Json:
        """Return the VM once it is in one of `states`; retry while the bus is down."""
        seen: list[Json] = []

        def reached() -> bool:
            with suppress(BusError, VirtbusError):
                seen.append(self.get(name))
                return seen[-1]["state"] in states
            return False

        until(reached, lambda: f"{name} {states}, but {seen[-1:]}", within_s=within_s)
        return seen[-1]

    def wait_ready(self, *names: str, within_s: float = 120) -> list[Json]:
        """Return the VMs once their guests have reported that they are ready."""

        def ready() -> bool:
            return all(is_ready(self.get(name)) for name in names)

        until(ready, f"{names} ready", within_s=within_s)
        return [self.get(name) for name in names]

    def console_log(self, name: str) -> str:
        """Return what `virtbus vm logs` prints; many tests wait for a line of it."""
        path = self.state_dir / "consoles" / f"{self.get(name)['uid']}.log"
        printed = path.read_bytes()[-LOG_BYTES:] if path.exists() else b""
        return Visible().text(printed).decode()

    def events(self, name: str) -> list[str]:
        """Return the kinds of a VM's events, in the order of the stream."""
        text = self.cli("vm", "events", name, "-o", "json")
        return [item["kind"] for item in _items(json.loads(text))]

    # --- faults ---------------------------------------------------------------------------
    def pids(self) -> dict[str, int]:
        """Return the running processes of the services and of the bus server, by name."""
        found = {}
        for pid, argv in host.children(self.up.pid).items():
            if Path(argv[0]).name == "nats-server":
                found["nats-server"] = pid
            elif argv[1:2] == ["-m"] and argv[2].startswith("virtbus."):
                found[argv[2].removeprefix("virtbus.")] = pid
        return found

    def pid(self, service: str) -> int:
        """Return the process of a service, or of `up` itself."""
        if service == "up":
            return self.up.pid
        found: int = until(lambda: self.pids().get(service), f"{service} runs", within_s=60)
        return found

    def kill(self, service: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a service; return the pid that got it."""
        pid = self.pid(service)
        os.kill(pid, number)
        return pid

    def wait_back(self, service: str, dead: int) -> None:
        """Return once the platform is whole again after a kill -9 of `service`."""
        if service == "up":
            self.up.wait(30)
            until(lambda: not _any_alive_below(self.base), "services end with up", within_s=30)
            self.start()
            return
        until(lambda: self.pids().get(service) not in {None, dead}, f"{service} again")
        self.wait_whole()

    def wait_whole(self, within_s: float = 60) -> None:
        """Return once the API answers and the node reports all its services as ready."""

        def whole() -> bool:
            try:
                nodes = NodePage.model_validate(self.ask("node.list", timeout_s=2)).items
            except (BusError, VirtbusError):
                return False
            return bool(nodes) and all(
                node.state is NodeState.READY
                and node.age_s < 10
                and all(s.state is NodeState.READY for s in node.services.values())
                for node in nodes
            )

        until(whole, "every service ready", within_s=within_s)

    # --- inspection -----------------------------------------------------------------------
    def census(self) -> list[str]:
        """Return the current objects of this platform on this host."""
        return host.take_census(self.state_dir, self.run_dir, self.uids)

    def learn_uids(self) -> None:
        """Record every VM that ever existed, so that the census can identify ours."""
        after = 0
        while True:
            page = self.ask("vm.events", {"after": after, "limit": 1000})
            self.uids.update(item["subject"].split(".")[3] for item in page.get("items") or ())
            if page.get("next_after") is None:
                return
            after = page["next_after"]

    def nothing_left(self) -> None:
        """Delete all VMs and wait until the host is as before the first one."""
        for vm in self.vms():
            self.ask("vm.delete", {"uid": vm["uid"], "grace_s": 0})
        until(lambda: not self.vms(), "all VMs deleted")
        self.learn_uids()
        self.wait_quiet()
        self.wait_no_keys()

    def wait_no_keys(self) -> None:
        """Return once the bus has no record, claim, secret or status of a VM."""

        async def keys() -> list[str]:
            async with self.bus("admin") as admin:
                found = [await standing(admin, f"$KV.{bucket}.>") for bucket in ("vm", "sec", "st")]
            return [key for held in found for key, value in held.items() if not lasts(key, value)]

        seen: list[list[str]] = []

        def none_left() -> bool:
            seen.append(asyncio.run(keys()))
            return not seen[-1]

        until(none_left, lambda: f"no keys of VMs on the bus, but {seen[-1]}", within_s=GONE_S)

    def wait_quiet(self, within_s: float = GONE_S) -> None:
        """Return once the census equals the one without VMs."""
        changed = ["?"]
        deadline = time.monotonic() + within_s
        while changed:
            changed = census.diff(self.quiet, self.census())
            assert not changed or time.monotonic() < deadline, "\n".join(changed)
            if changed:
                time.sleep(0.1)


async def standing(bus: NatsBus, watched: str) -> dict[str, bytes]:
    """Return the content of a bucket: key to value, without purged keys."""
    found: dict[str, bytes] = {}
    async with bus.watch(watched) as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                return found
            if isinstance(item, Entry) and item.kind is EntryKind.PUT:
                found[item.key] = item.value
    raise AssertionError(watched)


def lasts(key: str, value: bytes) -> bool:
    """Return True for keys of nodes and controllers, and for keys that expire by themselves.

    The latter are tombstones, and desired states of nodes that ask for nothing. These keep the
    ids of their last requests for a day.
    """
    last = key.rpartition(".")[2]
    if last == NODE_SPEC_KEY:
        return read(NodeSpec, value).idle
    nodes = {JOIN_KEY, HOST_KEY, HOSTS_KEY, IMAGES_KEY, POOLS_KEY, INSTANCE_KEY, RIVAL_KEY}
    of_nodes = last in nodes | {PEER_KEY}
    return of_nodes or f".{SIGNING}." in key or key.startswith(f"$KV.vm.{UNPLACED}.")


def _items(data: Any) -> list[Json]:
    found = data["items"] if isinstance(data, dict) else data
    return [item.get("data", item) if isinstance(item, dict) else {} for item in found]


def _any_alive_below(base: Path) -> list[int]:
    """Services whose environment names the run directory of a platform."""
    wanted = f"VIRTBUS_RUN_DIR={base}/run".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                environ = (folder / "environ").read_bytes().split(b"\0")
                argv = (folder / "cmdline").read_bytes()
                if wanted in environ and b"virtbus." in argv:
                    found.append(int(folder.name))
    return found


def is_ready(view: Json) -> bool:
    """Return True once the guest has answered, or has reported that it is up."""
    return any(c["type"] == "Ready" and c["status"] for c in view["conditions"])


def address(view: Json, nic: int = 0) -> str:
    """Return the first address of an interface, without its prefix."""
    found = str(view["interfaces"][nic]["addresses"][0]).partition("/")[0]
    assert _ADDRESS.match(found), view["interfaces"]
    return found


class Stage:
    """Holds at most one platform: two in one namespace would share bridge and filters."""

    def __init__(self) -> None:
        self._held: Platform | None = None
        self._before: list[str] = []

    def get(self) -> Platform:
        """Return the platform that most tests share."""
        if self._held is None:
            self._held = self._begin()
        return self._held

    @contextmanager
    def apart(
        self,
        environ: Mapping[str, str],
        prepare: Callable[[Platform], None] | None = None,
        *,
        whole: bool = True,
    ) -> Iterator[Platform]:
        """Start a platform for one test, with other settings; the shared one ends first."""
        self.end()
        self._held = platform = self._begin(environ, prepare, whole=whole)
        try:
            yield platform
        except BaseException:
            self.drop()
            raise
        self.end()

    def _begin(
        self,
        environ: Mapping[str, str] | None = None,
        prepare: Callable[[Platform], None] | None = None,
        *,
        whole: bool = True,
    ) -> Platform:
        platform = Platform(environ)
        try:
            if prepare is not None:
                prepare(platform)
            self._before = platform.census()
            platform.start(whole=whole)
            if whole:
                platform.wait_whole()
            platform.quiet = platform.census()
        except BaseException:
            platform.wipe()
            raise
        return platform

    def drop(self) -> None:
        """Kill a platform that a test broke, without a request to it."""
        if self._held is not None:
            self._held.wipe()
            self._held = None

    def end(self) -> None:
        """Stop the platform; the host is then as before it."""
        platform, self._held = self._held, None
        if platform is None:
            return
        try:
            platform.stop()
            left = census.diff(self._before, platform.census())
            assert not left, "\n".join(left)
        finally:
            platform.wipe()
