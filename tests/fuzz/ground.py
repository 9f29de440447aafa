"""The platform under attack: an honest node, and a node whose credentials the attackers hold.

`e2e` is a real node: imaged, netd and nodeagent, with libvirt's test driver in place of QEMU, so
that the attackers can be the guests. `evil` is a simulated node on the same bus. Every service
runs under the probe.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e import host
from tests.e2e.platform import Platform, until
from tests.fuzz.pool import BRIDGE_PORT, IMAGES_PORT

from virtbus.bus.errors import BusError
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState
from virtbus.simulator.test_driver import empty_host

EVIL = "evil"
"""The node whose three credentials are hostile."""
PROBE = Path(__file__).parent / "probe"
PLUGIN = Path(__file__).parent / "plugin" / "virtbus-fuzz"
NETWORK = "garbage"
"""The CNI network whose only plugin is ours."""
SWEEPS = {"VIRTBUS_SWEEP_INTERVAL_S": "2", "VIRTBUS_ORPHAN_GRACE_S": "5"}
"""A sweep sees within seconds what it would otherwise see after a minute."""
PSS = "Pss:"


class Ground(Platform):
    """Run `virtbus up` with both nodes."""

    def __init__(self) -> None:
        super().__init__(SWEEPS)
        self.words = ("up", "--nodes", EVIL, "--port", "-1")
        self.probes = self.base / "probes"
        self.probes.mkdir()
        self.seen = self.base / "neighbours"
        """The reports of the neighbours about themselves."""
        self._conf = self.base / "cni"
        self._plugin_log = self.base / "plugin.log"
        self._write_network()
        self.environ |= {
            "PYTHONPATH": str(PROBE),
            "VIRTBUS_FUZZ_PROBE": str(self.probes),
            "VIRTBUS_INSECURE_REGISTRIES": json.dumps([f"127.0.0.1:{IMAGES_PORT}"]),
            "VIRTBUS_IMAGE_ADDRESSES": json.dumps(["127.0.0.0/8"]),
            "VIRTBUS_CNI_CONF_DIR": str(self._conf),
            "VIRTBUS_CNI_BIN_DIRS": json.dumps([str(PLUGIN.parent), "/usr/lib/cni"]),
            "VIRTBUS_CNI_TIMEOUT_S": "2",
        }
        uri = empty_host(self.base / "test-host.xml")
        self.environ["VIRTBUS_LIBVIRT_URI"] = uri
        self._evil: subprocess.Popen[bytes] | None = None
        self._bridge: subprocess.Popen[bytes] | None = None

    def _write_network(self) -> None:
        self._conf.mkdir()
        plugins = [{"type": PLUGIN.name, "log": str(self._plugin_log)}]
        conflist = {"cniVersion": "1.0.0", "name": NETWORK, "plugins": plugins}
        (self._conf / "fuzz.conflist").write_text(json.dumps(conflist))

    # --- lifecycle ------------------------------------------------------------------------
    def start(self, *, whole: bool = True) -> None:
        """Run both nodes until both are ready."""
        super().start(whole=whole)
        base = self.base / EVIL
        argv = ("--simulate", "--creds", str(self.run_dir / f"node-{EVIL}.creds"))
        environ = {
            name: value
            for name, value in self.environ.items()
            if name not in {"VIRTBUS_STATE_DIR", "VIRTBUS_RUN_DIR", "VIRTBUS_NODE"}
        }
        with self.log.open("ab") as log:
            self._evil = subprocess.Popen(
                ["virtbus", "node", "up", *argv, "--data", str(base)],
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        with self.log.open("ab") as log:
            self._bridge = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.webhooks"],
                env=self.environ,
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=log,
            )
        until(_bridge_listens, "the bridge's port")
        until(lambda: self._ready() == {"e2e", EVIL}, lambda: f"ready: {self._ready()}")

    def _ready(self) -> set[str]:
        try:
            nodes = NodePage.model_validate(self.ask("node.list", timeout_s=2)).items
        except (BusError, VirtbusError):
            return set()
        return {node.node for node in nodes if node.state is NodeState.READY}

    def stop(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.kill()
            bridge.wait(10)
        evil, self._evil = self._evil, None
        if evil is not None and evil.poll() is None:
            evil.terminate()
            try:
                evil.wait(30)
            except subprocess.TimeoutExpired:
                for pid in [*host.children(evil.pid), evil.pid]:
                    os.kill(pid, 9)
                evil.wait(10)
        super().stop()

    # --- inspection -----------------------------------------------------------------------
    def services(self) -> dict[str, int]:
        """Return each of our services with its process; the second agent is `simulator-evil`."""
        found = {name: pid for name, pid in self.pids().items() if name != "nats-server"}
        if self._bridge is not None and self._bridge.poll() is None:
            found["webhooks"] = self._bridge.pid
        if self._evil is not None:
            for pid, argv in host.children(self._evil.pid).items():
                if argv[1:2] == ["-m"] and argv[2].startswith("virtbus."):
                    found[f"{argv[2].removeprefix('virtbus.')}-{EVIL}"] = pid
        return found

    def slow_callbacks(self) -> list[dict[str, Any]]:
        """Return the records of the probes."""
        found = []
        for path in sorted(self.probes.glob("*.jsonl")):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [json.loads(line) for line in lines if line.endswith("}")]
        return found

    def plugin_log(self) -> str:
        """A word for each run of the CNI plugin."""
        return self._plugin_log.read_text() if self._plugin_log.exists() else ""

    def login(self, user: str) -> dict[str, Any]:
        """Return the content of a role's credentials file."""
        name = "bus" if user == "client" else user
        content: dict[str, Any] = json.loads((self.run_dir / f"{name}.creds").read_text())
        return content


def _bridge_listens() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", BRIDGE_PORT)) == 0


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    line = next(line for line in text.splitlines() if line.startswith(PSS))
    return int(line.split()[1]) * 1024


@contextmanager
def attacked() -> Iterator[Ground]:
    """Yield the started platform, and remove it at the end."""
    host.refuse_the_machines_own_network()
    ground = Ground()
    try:
        ground.start()
        ground.wait_whole()
        yield ground
    finally:
        ground.wipe()
