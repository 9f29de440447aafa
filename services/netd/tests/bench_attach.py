"""Prints netd's figures, one JSON line each. Run this file as root.

Everything runs in a network namespace of its own. CPU is that of this process and its children.
Medians reduce the effect of other load.
"""

import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from services.netd.tests.pretended_host import Host, Node, eventually, make_record, pretended_host
from services.netd.tests.test_cni import bridge, conflist
from services.netd.tests.test_dhcp import request
from services.netd.tests.test_dhcp_server import ask, reply
from services.netd.tests.test_handover import DOMAIN, Desk

from virtbus.netd.core.dhcp import MessageType, answer, parse
from virtbus.netd.core.dhcp_offer import offers_of
from virtbus.netd.edge.fd_passing import HandoverServer
from virtbus.schemas.node_rpc import NetReady

CYCLES = 30
MANY = 300


def cpu_ms() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) * 1000


class Figure:
    """Samples of one figure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    @contextmanager
    def sample(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), cpu_ms()
        yield
        self.wall_ms.append((time.perf_counter() - wall) * 1000)
        self.cpu_ms.append(cpu_ms() - cpu)

    def tell(self) -> None:
        ordered = sorted(self.wall_ms)
        line = {
            "figure": self.name,
            "n": len(ordered),
            "median_ms": round(statistics.median(ordered), 3),
            "p95_ms": round(ordered[int(len(ordered) * 0.95) - 1], 3),
            "cpu_ms": round(statistics.median(self.cpu_ms), 3),
        }
        sys.stdout.write(json.dumps(line) + "\n")


def uids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _number in range(count)]


async def growth(node: Node) -> None:
    """Attach at the first and at the 300th VM; release."""
    first, last, release = (
        Figure("attach, VMs 2-30"), Figure(f"attach, at {MANY} VMs"), Figure("release")
    )  # fmt: skip
    made = uids(MANY)
    for number, uid in enumerate(made):
        figure = first if 0 < number < CYCLES else Figure("")
        with (last if number >= MANY - CYCLES else figure).sample():
            await node.attachments.ensure(make_record(uid))
    recover = Figure(f"recover {MANY} VMs")
    node.stop()
    with recover.sample():
        await node.start()
    for uid in made:
        with release.sample():
            await node.attachments.release(uid, 1)
    for figure in (first, last, recover, release):
        figure.tell()


async def plugins(node: Node) -> None:
    """The CNI bridge plugin with host-local."""
    attach, begun, release = Figure("CNI attach"), Figure("CNI begun"), Figure("CNI release")
    conflist(node, "lan", bridge(node))
    for uid in uids(CYCLES):
        started = time.perf_counter()

        async def told(_ready: NetReady, started: float = started) -> None:
            begun.wall_ms.append((time.perf_counter() - started) * 1000)
            begun.cpu_ms.append(0.0)

        with attach.sample():
            await node.attachments.ensure(make_record(uid, networks=("lan",)), told)
        with release.sample():
            await node.attachments.release(uid, 1)
    os.system("ip link del cnitest0")
    for figure in (attach, begun, release):
        figure.tell()


async def dhcp(node: Node) -> None:
    """A DISCOVER over the tap until its OFFER, and parse and build alone."""
    (uid,) = uids(1)
    await node.attach(uid)
    served, pure = Figure("DHCP answer over the tap"), Figure("DHCP parse and build")
    attachment, taps = await node.attachments.take_taps(uid, 1)
    os.close(taps[0])
    offer = offers_of(attachment, node.site)[0]
    async with node.guest(uid) as guest:
        for _cycle in range(CYCLES):
            await asyncio.sleep(0.06)  # within the rate limit
            with served.sample():
                ask(guest, MessageType.DISCOVER)
                await reply(guest)
        message = request(MessageType.DISCOVER, mac=guest.mac)
    for _cycle in range(1000):
        with pure.sample():
            parsed = parse(message)
            assert parsed is not None
            assert offer is not None
            assert answer(parsed, offer) is not None
    for figure in (served, pure):
        figure.tell()


async def handover(node: Node) -> None:
    """Grant, and the wrapper from exec to the exec of its emulator (/bin/true)."""
    (uid,) = uids(1)
    await node.attach(uid)
    figures = {name: Figure(name) for name in ("arm", "wrapper in C", "wrapper in Python")}
    granted = Figure("netd's part of a hand-over")
    done: list[float] = []
    server = HandoverServer(
        node.host.tmp / "run" / "netd",
        node.attachments,
        "/bin/true",
        lambda each: done.append((each.granted_ns - each.asked_ns) / 1e6),
        read_peer=lambda _pid: (
            b"-uuid\0" + uid.encode() + b"\0",
            f"0::/qemu-1-{DOMAIN}.libvirt-qemu",
        ),
    )
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.run())
        await eventually(server.wrapper_path.exists)
        desk = Desk(node, server, [])
        paths = {"wrapper in C": desk.wrapper("c"), "wrapper in Python": desk.wrapper("python")}
        for _cycle in range(CYCLES):
            for name, path in paths.items():
                with figures["arm"].sample():
                    await desk.arm(uid)
                with figures[name].sample():
                    command = [str(path), "-name", "guest=x", "-uuid", uid]
                    process = await asyncio.create_subprocess_exec(*command)
                    assert await process.wait() == 0
        serving.cancel()
    granted.wall_ms, granted.cpu_ms = done, [0.0]
    for figure in (*figures.values(), granted):
        figure.tell()


async def measure(host: Host) -> None:
    for part in (growth, plugins, dhcp, handover):
        node = Node(host)
        await node.start()
        try:
            await part(node)
        finally:
            await node.end()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, pretended_host(Path(scratch)) as host:
        asyncio.run(measure(host))


if __name__ == "__main__":
    main()
