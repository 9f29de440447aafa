"""A platform to measure: `virtbus up` with a guest that halts at once and costs no CPU."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virtbus.bus.client import connection
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7

IMAGE = "guest"
HALT = (b"\xfa\xf4\xeb\xfd").ljust(510, b"\0") + b"\x55\xaa"
VIRTBUS = str(Path(sys.executable).with_name("virtbus"))
READY_S = 60.0
CNI = {
    "cniVersion": "1.0.0",
    "name": "bench",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "benchbr0",
            "isGateway": True,
            "ipam": {"type": "host-local", "subnet": "10.99.0.0/16"},
        }
    ],
}


@dataclass
class Stage:
    """A running platform and a client of it."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    bus: NatsBus
    watch: "Watch"
    made: list[str] = field(default_factory=list)

    async def create(self, network: str = "default", name: str = "") -> tuple[float, str]:
        """Return the seconds until this client learns that the VM is Running, and the uid."""
        uid = uuid7()
        loop = asyncio.get_running_loop()
        running = self.watch.expect(uid, lambda vm: vm.get("state") == "Running")
        begun = loop.time()
        request = {
            "uid": uid,
            "name": name or f"b{uid[-12:]}",
            "image": IMAGE,
            "memory": "64MiB",
            "network": network,
        }
        await self.bus.request("virtbus.api.v1.vm.create", request, timeout_s=30)
        async with asyncio.timeout(20):
            ended = await running
        self.made.append(uid)
        return ended - begun, uid

    async def delete(self, uid: str) -> float:
        """Return the seconds until this client learns that the VM is gone."""
        gone = self.watch.expect(uid, lambda vm: bool(vm.get("gone")))
        begun = asyncio.get_running_loop().time()
        await self.bus.request("virtbus.api.v1.vm.delete", {"uid": uid, "grace_s": 0}, timeout_s=30)
        async with asyncio.timeout(120):
            ended = await gone
        self.made.remove(uid)
        return ended - begun

    async def clear(self) -> None:
        """Delete all remaining VMs."""
        for uid in list(self.made):
            await self.delete(uid)

    def pids(self) -> dict[str, int]:
        """Return the platform's processes by service."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                argv = path.read_bytes().decode(errors="replace").split("\0")
                environ = (path.parent / "environ").read_bytes()
                if str(self.folder).encode() in environ or str(self.folder) in " ".join(argv):
                    name = next((a for a in argv if a.startswith("virtbus.")), "")
                    if name or "nats-server" in argv[0]:
                        found[name.removeprefix("virtbus.") or "nats-server"] = int(
                            path.parent.name
                        )
        return found


class Watch:
    """One watch over all VMs; it records, by the loop's clock, when an expectation comes true."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._expected: dict[str, list[tuple[Any, asyncio.Future[float]]]] = {}
        self.synced = asyncio.Event()

    def expect(self, uid: str, true: Any) -> "asyncio.Future[float]":
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._expected.setdefault(uid, []).append((true, future))
        return future

    @property
    def expected(self) -> set[str]:
        """The uids of all VMs with an expectation, past or present."""
        return set(self._expected)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        async with self._bus.request_stream(
            "virtbus.api.v1.vm.watch", {}, idle_timeout_s=15
        ) as replies:
            renew = ""
            async for reply in replies:
                renew = reply.get("renew") or renew
                if loop.time() - renewed > 10 and renew:
                    renewed = loop.time()
                    await self._bus.publish(renew, {})
                if reply.get("synced"):
                    self.synced.set()
                if reply.get("change"):
                    self._tell(reply["change"]["uid"], reply["change"], loop.time())
                if reply.get("gone"):
                    self._tell(reply["gone"], {"gone": True}, loop.time())

    def _tell(self, uid: str, vm: dict[str, Any], now: float) -> None:
        waiting = self._expected.get(uid, [])
        for entry in list(waiting):
            true, future = entry
            if true(vm) and not future.done():
                future.set_result(now)
                waiting.remove(entry)


@asynccontextmanager
async def stage(guest: Path | None = None, **environment: str) -> AsyncIterator[Stage]:
    """Run a platform while the context is open, and remove everything of it afterwards.

    `guest` is the image of its VMs, instead of the guest that halts.
    """
    folder = Path(tempfile.mkdtemp(prefix="virtbus-bench-", dir="/var/tmp"))
    folder.chmod(0o711)
    (folder / "cni").mkdir()
    (folder / "cni" / "bench.conflist").write_text(json.dumps(CNI))
    source = folder / "state" / "images" / "src"
    source.mkdir(parents=True)
    if guest is None:
        (source / "guest").write_bytes(HALT.ljust(1024 * 1024, b"\0"))
    else:
        shutil.copy(guest, source / "guest")
    env = {
        **os.environ,
        "VIRTBUS_NAMES": f'{{"{IMAGE}": "file://{source}/guest"}}',
        "VIRTBUS_CNI_CONF_DIR": str(folder / "cni"),
        "VIRTBUS_NETWORK_NAMESPACES": '{"bench": ["*"]}',
        "VIRTBUS_ACCELERATOR": "tcg",
        **environment,
    }
    log = (folder / "up.log").open("wb")
    process = subprocess.Popen(
        [VIRTBUS, "up", "--data", str(folder), "--node", "bench", "--port", "-1", "--force"],
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        await _ready(folder, process)
        creds = next(folder.rglob("bus.creds"))
        async with (
            connection.connect(BusSettings(creds=creds), name="bench") as bus,
            asyncio.TaskGroup() as group,
        ):
            watch = Watch(bus)
            running = group.create_task(watch.run())
            await watch.synced.wait()
            here = Stage(folder, process, bus, watch)
            try:
                yield here
            finally:
                await here.clear()
                running.cancel()
    except Exception:
        sys.stderr.write((folder / "up.log").read_text())  # the only evidence of a failure
        raise
    finally:
        process.terminate()
        process.wait(30)
        log.close()
        # the agent makes layers immutable
        subprocess.run(["chattr", "-R", "-f", "-i", str(folder)], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


async def _ready(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    give_up = asyncio.get_running_loop().time() + READY_S
    while b"virtbus is up" not in (folder / "up.log").read_bytes():
        if process.poll() is not None or asyncio.get_running_loop().time() > give_up:
            raise SystemExit((folder / "up.log").read_text())
        await asyncio.sleep(0.1)
