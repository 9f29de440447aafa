"""The API as used by a stranger's program: pages, and watches that outlive a controller."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.bus_settings import BusSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

VIRTBUS = Path(sys.executable).with_name("virtbus")
Json = dict[str, Any]


@asynccontextmanager
async def platform(place: Path) -> AsyncIterator[NatsBus]:
    """A client of a simulated platform below `place`; the platform ends in any case."""
    said = place / "up.log"
    with said.open("wb") as log:
        up = subprocess.Popen(
            [VIRTBUS, "up", "--simulate", "--data", place, "--port", "-1", "--node", "n1"],
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(60):
            while b"virtbus is up" not in said.read_bytes():
                assert up.poll() is None, said.read_text()
                await asyncio.sleep(0.05)
        async with connect(BusSettings.found(place / "run", "client"), name="test") as bus:
            yield bus
    finally:
        up.terminate()
        await asyncio.to_thread(up.wait, 30)


def controller(place: Path) -> int:
    """Return the pid of the platform's controller."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            argv = (entry / "cmdline").read_bytes()
            here = bytes(place / "run") in (entry / "environ").read_bytes()
            if here and b"virtbus.controller" in argv:
                return int(entry.name)
    raise AssertionError(place)


async def ask(bus: NatsBus, verb: str, **data: Any) -> Any:
    return await bus.request(f"virtbus.api.v1.{verb}", data, timeout_s=10)


async def create(bus: NatsBus, *names: str) -> None:
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(ask(bus, "vm.create", name=name, image="tiny"))


async def watched(bus: NatsBus, until: Callable[[Json], bool], **want: Any) -> list[Json]:
    """Return the replies of a watch up to the first one for which `until` is true."""
    heard: list[Json] = []
    async with bus.request_stream("virtbus.api.v1.vm.watch", want, idle_timeout_s=20) as replies:
        async for reply in replies:
            heard.append(reply)
            if until(reply):
                return heard
    raise AssertionError(heard)


async def test_pages_follow_each_other_and_name_every_vm_once(tmp_path: Path) -> None:
    names = [f"vm-{number:02}" for number in range(11)]
    async with platform(tmp_path) as bus:
        await create(bus, *names)
        found: list[str] = []
        sizes: list[int] = []
        page = await ask(bus, "vm.list", limit=5)
        while True:
            sizes.append(len(page["items"]))
            found += [vm["name"] for vm in page["items"]]
            if not page.get("continue"):
                break
            page = await ask(bus, "vm.list", limit=5, **{"continue": page["continue"]})
    assert sizes == [5, 5, 1]
    assert found == names


async def test_a_watch_resumes_on_another_controller(tmp_path: Path) -> None:
    async with platform(tmp_path) as bus:
        await create(bus, "kept", "lost")
        running: set[str] = set()

        def settled(reply: Json) -> bool:
            views = [*reply.get("items", ()), *filter(None, [reply.get("change")])]
            running.update(vm["name"] for vm in views if vm["state"] == "Running")
            return bool(reply.get("beat")) and running == {"kept", "lost"}

        after = (await watched(bus, settled))[-1]["after"]
        os.kill(controller(tmp_path), signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                with suppress(BusError):
                    lost = await ask(bus, "vm.get", name="lost")
                    break
        await ask(bus, "vm.delete", uid=lost["uid"])
        await create(bus, "new")

        told: dict[str, str] = {}

        def all_told(reply: Json) -> bool:
            if reply.get("change"):
                told[reply["change"]["name"]] = reply["change"]["state"]
            if reply.get("gone"):
                told["gone"] = reply["gone"]
            return "new" in told and "gone" in told

        await watched(bus, all_told, after=after)
    assert told["gone"] == lost["uid"]
    assert "kept" not in told
