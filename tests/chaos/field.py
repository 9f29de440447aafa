"""One simulated node behind a link that can fail; all else runs as with `virtbus up`."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.chaos.link import Link
from tests.chaos.simulated import MIB, Simulated
from tests.e2e import host
from tests.e2e.platform import NODE, until

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.probes import any_port
from virtbus.bus.runtime.bus_settings import BusSettings

BUS_DISK_BYTES = 128 * MIB


class Field(Simulated):
    """`virtbus up --no-node` with a small disk of its own, and `virtbus node up` behind a Link."""

    name = NODE

    simulate = True

    def __init__(self, environ: Mapping[str, str] | None = None, *, seed: int = 0) -> None:
        super().__init__(environ)
        self.bus_dir = self.base / "bus"
        self.store = self.bus_dir / "state" / "nats"
        self._port = any_port("127.0.0.1")
        self.link = Link(("127.0.0.1", self._port), seed)
        self.at_end.callback(self.link.close)
        self.environ["VIRTBUS_CREDS"] = str(self._creds("bus"))
        self.own_disk(self.store, BUS_DISK_BYTES)
        self._node: subprocess.Popen[bytes] | None = None
        self.struck = (self,)
        """The places of strikes."""

    def _creds(self, user: str) -> Path:
        return self.bus_dir / "run" / f"{user}.creds"

    # --- lifecycle ------------------------------------------------------------------------
    def start(self, *, whole: bool = True) -> None:
        """Run both, until the node is ready."""
        self.lay_out_images()
        self.start_bus()
        self.start_node()
        if whole:
            self.wait_whole()

    def start_bus(self) -> None:
        """Run `virtbus up --no-node` until the API answers."""
        argv = ("up", "--simulate", "--no-node", "--nodes", NODE, "--port", str(self._port))
        self._up = self._run(*argv, "--data", str(self.bus_dir))
        until(lambda: self.try_cli("vm", "list").returncode == 0, "the API")

    def start_node(self) -> None:
        """Start `virtbus node up`; it becomes ready a moment later."""
        argv = ("--name", NODE, "--creds", str(self._creds(f"node-{NODE}")), "--simulate")
        wire = ("--nats", f"nats://127.0.0.1:{self.link.port}", "--data", str(self.base))
        self._node = self._run("node", "up", *argv, *wire)

    def _run(self, *argv: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["virtbus", *argv],
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def node_up(self) -> "subprocess.Popen[bytes]":
        assert self._node is not None, "not started"
        return self._node

    def kill_node(self) -> None:
        """Kill all our processes on the node at once, as OOM or a panic of systemd would."""
        pids = [self.node_up.pid, *host.children(self.node_up.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.node_up.wait(10)

    def stop(self) -> None:
        node, self._node = self._node, None
        if node is not None and node.poll() is None:
            node.send_signal(signal.SIGCONT)
            node.terminate()
            try:
                node.wait(60)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait(10)
                raise
        super().stop()

    def pids(self) -> dict[str, int]:
        """Return the services of both, by name."""
        found = super().pids()
        if self._node is not None:
            for pid, argv in host.children(self._node.pid).items():
                if argv[1:2] == ["-m"] and argv[2].startswith("virtbus."):
                    found[argv[2].removeprefix("virtbus.")] = pid
        return found

    @asynccontextmanager
    async def bus(self, user: str = "client") -> AsyncIterator[NatsBus]:
        """Connect without the link."""
        settings = BusSettings(creds=self._creds("bus" if user == "client" else user))
        async with connect(settings, name="test") as bus:
            yield bus
