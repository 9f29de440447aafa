"""`python -m tests.fuzz.neighbours RUN_DIR FILE`: honest tenants, in their own process.

Each creates a VM on the honest node, waits until it runs, and deletes it. FILE gets a line for
each life: its start, the time until the VM ran, or the failure. A further task uses shared
resources: lists, watches, nodes, status, pulls. It ends with SIGTERM, with its VMs deleted.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

import aiohttp
from aiohttp import web
from services.imaged.tests.site_under_test import qcow2_image
from services.kubebridge.tests.manifests import vm
from tests.fuzz.pool import BRIDGE_PORT

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import Retry, VirtbusError

NAMESPACE = "good"
TENANTS = 2
REST_S = 0.4
LOOK_S = 0.03
HONEST, HONEST_PORT = "127.0.0.2", 18081
BRIDGE = f"http://127.0.0.1:{BRIDGE_PORT}"
LATE_S = 30.0
"""A VM that does not run, or is not gone, by then counts as refused."""
SHARED_S = 4.0
NODE = "e2e"

Json = dict[str, Any]


class Neighbours:
    """The tenants; `lines` collects their observations."""

    def __init__(self, bus: NatsBus, lines: TextIO) -> None:
        self._bus = bus
        self._lines = lines
        self._over = asyncio.Event()
        self._pulled = 0
        self._images = f"http://{HONEST}:{HONEST_PORT}/good"

    def end(self) -> None:
        self._over.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(TENANTS):
                group.create_task(self._tenant())
            group.create_task(self._shared())

    def _tell(self, **line: Any) -> None:
        self._lines.write(json.dumps({"at_s": time.time(), **line}) + "\n")
        self._lines.flush()

    async def _tenant(self) -> None:
        while not self._over.is_set():
            uid = uuid7()
            begun_s = time.monotonic()
            try:
                async with asyncio.timeout(LATE_S):
                    await self._ask("create", _wanted(uid))
                    accepted_s = time.monotonic() - begun_s
                    await self._until(uid, lambda view: view and view["state"] == "Running")
                took_s = time.monotonic() - begun_s
                self._tell(kind="create", uid=uid, accepted_s=accepted_s, took_s=took_s)
            except (TimeoutError, VirtbusError, BusError) as error:
                self._tell(kind="failed", uid=uid, why=f"create: {str(error) or 'late'}")
            try:
                async with asyncio.timeout(LATE_S):
                    await self._ask("delete", {"uid": uid, "grace_s": 0})
                    await self._until(uid, lambda view: view is None)
            except (TimeoutError, VirtbusError, BusError) as error:
                self._tell(kind="failed", uid=uid, why=f"delete: {str(error) or 'late'}")
            await self._rest(REST_S)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return

    async def _until(self, uid: str, right: Callable[[Json | None], object]) -> None:
        while True:
            try:
                view = await self._ask("get", {"uid": uid})
            except VirtbusError as error:
                if error.code != 404:
                    raise
                view = None
            if right(view):
                return
            await asyncio.sleep(LOOK_S)

    async def _ask(self, verb: str, data: Json) -> Any:
        """Return the answer; repeat the request with the same id if a repeat may help."""
        repeated = False
        while True:
            try:
                return await self._bus.request(f"virtbus.api.v1.vm.{verb}", data, timeout_s=5)
            except VirtbusError as error:
                if verb == "delete" and error.code == 404:
                    return None
                if error.body.retry is Retry.NEVER:
                    raise
            except BusError:
                if repeated:
                    await asyncio.sleep(0.2)
            repeated = True
            await asyncio.sleep(0.05)

    # --- shared resources -----------------------------------------------------------------
    async def _shared(self) -> None:
        looks: dict[str, Callable[[], Awaitable[None]]] = {
            "vm.list": self._list,
            "vm.watch": self._watch,
            "node.list": lambda: self._plain("node.list"),
            "bus.status": lambda: self._plain("bus.status"),
            "image.pull": self._pull,
            "admission": self._admitted,
        }
        while not self._over.is_set():
            for name, look in looks.items():
                begun_s = time.monotonic()
                try:
                    async with asyncio.timeout(15):
                        await _insist(look)
                    self._tell(kind="look", what=name, took_s=time.monotonic() - begun_s)
                except (TimeoutError, VirtbusError, BusError, aiohttp.ClientError) as error:
                    self._tell(kind="blind", what=name, why=str(error) or "late")
            await self._rest(SHARED_S)

    async def _plain(self, verb: str) -> None:
        await self._bus.request(f"virtbus.api.v1.{verb}", {}, timeout_s=10)

    async def _pull(self) -> None:
        """Pull a small new image of an honest server in time."""
        self._pulled += 1
        asked = {"ref": f"{self._images}/{self._pulled}", "node": NODE}
        found = await self._bus.request("virtbus.api.v1.image.pull", asked, timeout_s=14)
        if found.get("errors"):
            raise BusError(str(found["errors"]))

    async def _admitted(self) -> None:
        """Send the API server's review of a plain manifest and wait for the answer."""
        from_elsewhere = aiohttp.TCPConnector(local_addr=(HONEST, 0))
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(connector=from_elsewhere, timeout=timeout) as session,
            session.post(f"{BRIDGE}/admission/validate", data=_review()) as answer,
        ):
            said = await answer.json()
            if not said["response"]["allowed"]:
                raise BusError(str(said)[:300])

    async def _list(self) -> None:
        more: str | None = None
        while True:
            asked = {"limit": 100} | ({"continue": more} if more else {})
            page = await self._bus.request("virtbus.api.v1.vm.list", asked, timeout_s=10)
            more = page.get("continue")
            if not more:
                return

    async def _watch(self) -> None:
        """Watch everything up to the end of the list."""
        subject = "virtbus.api.v1.vm.watch"
        async with self._bus.request_stream(subject, {}, idle_timeout_s=10) as answers:
            async for answer in answers:
                if answer.get("synced"):
                    return
        msg = "the watch ended before it was synced"
        raise BusError(msg)


async def _insist(look: Callable[[], Awaitable[None]]) -> None:
    """Repeat a check if its error says that a repeat may help."""
    while True:
        try:
            await look()
        except VirtbusError as error:
            if error.body.retry is Retry.NEVER:
                raise
            await asyncio.sleep(0.2)
        else:
            return


def _review() -> bytes:
    request = {"uid": "u", "kind": {"kind": "VirtualMachine"}, "operation": "CREATE"}
    whole = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
    return json.dumps(whole | {"request": request | {"object": vm()}}).encode()


@asynccontextmanager
async def _image_server() -> AsyncIterator[None]:
    """An honest image server, at an address of its own."""
    image = qcow2_image(payload=0)

    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=image)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, HONEST, HONEST_PORT).start()
        yield
    finally:
        await runner.cleanup()


def _wanted(uid: str) -> Json:
    return {
        "uid": uid,
        "name": f"g-{uid[-12:]}",
        "namespace": NAMESPACE,
        "image": "tiny",
        "memory": "32MiB",
        "spec": {"node_selector": {"kubernetes.io/hostname": NODE}},
    }


async def main(run_dir: Path, file: Path) -> None:
    settings = BusSettings.found(run_dir, "client")
    with file.open("a", encoding="utf-8") as lines:
        async with connect(settings, name="neighbours") as bus, _image_server():
            neighbours = Neighbours(bus, lines)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, neighbours.end)
            await neighbours.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
