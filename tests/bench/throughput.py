"""TCP streams between guests, and between a guest and its host, against QEMU with plain taps."""

import asyncio
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure
from tests.bench.measures import cpu_s
from tests.bench.plain_guests import plain_guests, plain_network, share_cpu
from tests.bench.stage import IMAGE, Stage, stage
from tests.e2e.login import Login
from tests.e2e.platform import is_ready

from virtbus.bus.runtime.ids import uuid7
from virtbus.netd.core.names import host_link

PORT, SECONDS = 5001, 4
GIGABYTE = 10**9
SLOWEST, COSTLIEST = 0.85, 1.2
READY_S = 120.0
"""The guests are ready within this, on a busy machine without KVM."""
ONE_VCPU = "echo 0 > /sys/devices/system/cpu/cpu1/online"
"""Switches the second vCPU off. QEMU 7.2 without KVM ignores the memory barriers of a guest whose
machine has one vCPU. Such a guest can lose an interrupt of its network card."""
PATHS = ("guest to guest", "guest to host", "host to guest")

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running guests on one network."""

    views: Sequence[View]
    pids: Sequence[int]
    """Processes whose CPU a stream costs, besides the kernel's threads and the host's program."""
    login: Login
    links: Sequence[str]
    """For each guest, a link of its host that sees each frame of it once."""
    enter: Sequence[str] = ()
    """The words before a command of the guests' host."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream."""

    mbit_s: float
    cpu_s_per_gb: float
    bytes_per_packet: float
    """Above the MTU if the guests' offloads reach the host."""


async def throughput(disk: Path, runs: int) -> list[Figure]:
    """Return the rate and the CPU per gigabyte of each path, as ratios; interleaved with plain."""
    async with stage(disk) as here:
        return await _on(here, disk, runs)


async def _on(here: Stage, disk: Path, runs: int) -> list[Figure]:
    ours_folder, plain_folder = here.folder / "ours", here.folder / "plain"
    ours_folder.mkdir()
    plain_folder.mkdir()
    login = Login(ours_folder)
    program = here.folder / "stream"
    source = Path(__file__).with_name("stream.c")
    build = ["gcc", "-std=gnu11", "-O2", "-static", "-s", "-o", str(program), str(source)]
    await asyncio.to_thread(lambda: subprocess.run(build, check=True))
    ours = await _vms(here, login)

    def measured() -> list[Figure]:
        # libvirtd's guests have the normal scheduling, and this process may have another one. The
        # plain guests and the host's programs inherit it
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        with plain_network() as enter:
            key = Login(plain_folder, enter=enter)
            with plain_guests(
                enter, plain_folder, disk, _text(key), _qemu_of(ours.views[0])
            ) as guests:
                plain = Pair(
                    [one.view for one in guests],
                    [one.pid for one in guests],
                    key,
                    [one.tap for one in guests],
                    enter,
                )
                for pair in (ours, plain):
                    for view in pair.views:
                        pair.login.give(view, program.read_bytes(), "/root/stream")
                        pair.login(view, ONE_VCPU)
                for guest, view in zip(guests, ours.views, strict=True):  # all threads run now
                    share_cpu(guest.pid, _qemu_of(view))
                return [
                    figure
                    for path in PATHS
                    for figure in _compared(path, ours, plain, program, runs)
                ]

    return await asyncio.to_thread(measured)


def _text(login: Login) -> str:
    return Path(login.public_key).read_text(encoding="utf-8").strip()


async def _vms(here: Stage, login: Login) -> Pair:
    """Create two VMs; return them once their guests are ready."""
    uids, ready = [], []
    for name in ("stream-a", "stream-b"):
        uid = uuid7()
        uids.append(uid)
        ready.append(here.watch.expect(uid, lambda vm: is_ready({"conditions": (), **vm})))
        request = {
            "uid": uid,
            "name": name,
            "image": IMAGE,
            "memory": "128MiB",
            "cpus": 2,
            "ssh_keys": [_text(login)],
        }
        await here.bus.request("virtbus.api.v1.vm.create", request, timeout_s=30)
        here.made.append(uid)
    async with asyncio.timeout(READY_S):
        for one in ready:
            await one
    get = "virtbus.api.v1.vm.get"
    views = [await here.bus.request(get, {"uid": uid}, timeout_s=5) for uid in uids]
    pids = [*(_qemu_of(view) for view in views), here.pids()["netd"]]
    return Pair(views, pids, login, [host_link(uid, 0) for uid in uids])


def _qemu_of(view: View) -> int:
    return int(Path(f"/run/libvirt/qemu/vb-{view['uid']}.pid").read_text())


def _compared(path: str, ours: Pair, plain: Pair, program: Path, runs: int) -> list[Figure]:
    """Measure a path in turns; who begins changes with each round."""
    kernel = _softirq_threads()
    found: dict[int, list[Stream]] = {id(ours): [], id(plain): []}
    for number in range(runs):
        for pair in (ours, plain) if number % 2 else (plain, ours):
            found[id(pair)].append(_stream(path, pair, program, kernel))
    return _figures(path, found[id(ours)], found[id(plain)])


def _softirq_threads() -> list[int]:
    """Return the pids of ksoftirqd: what a process does not forward itself, they forward."""
    comms = Path("/proc").glob("[0-9]*/comm")
    return [int(one.parent.name) for one in comms if one.read_text().startswith("ksoftirqd/")]


def _stream(path: str, pair: Pair, program: Path, kernel: Sequence[int]) -> Stream:
    """Send for SECONDS. The guest that listens is asked first, and its peer tries until it does.

    Guests may not open connections to their host. So the host connects in both directions.
    """
    first, second = pair.views
    at = second["interfaces"][0]["addresses"][0].partition("/")[0]
    into, out = "receive", "send"
    if path == "guest to host":
        into, out = out, into
    listener = pair.login.start(second, f"/root/stream listen {PORT} {into} {SECONDS}")
    words = ("connect", at, str(PORT), out, str(SECONDS))
    if path == "guest to guest":
        connector = pair.login.start(first, " ".join(("/root/stream", *words)))
        programs = []
    else:
        argv = [*pair.enter, str(program), *words]
        connector = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        programs = [connector.pid]
    receiver = connector if out == "receive" else listener
    pids = [*pair.pids, *programs, *kernel]
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "begin\n"
    before, sent = {pid: cpu_s(pid) for pid in pids}, _counted(path, pair)
    _, size, took_ns = receiver.stdout.readline().split()
    # The host's program ends with the stream. Until it is waited for, its CPU can be read.
    spent = sum(cpu_s(pid) - before[pid] for pid in pids)
    octets, packets = (late - early for late, early in zip(_counted(path, pair), sent, strict=True))
    for process in (listener, connector):
        assert process.wait(60) == 0
    return Stream(
        int(size) * 8e3 / int(took_ns), spent / int(size) * GIGABYTE, octets / max(packets, 1)
    )


def _counted(path: str, pair: Pair) -> tuple[int, int]:
    """Return the bytes and packets in the direction of the stream, on the link of one guest."""
    guest, way = (1, "tx") if path != "guest to host" else (1, "rx")
    argv = [*pair.enter, "ip", "-j", "-s", "link", "show", "dev", pair.links[guest]]
    answer = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    counters = json.loads(answer)[0]["stats64"][way]
    return counters["bytes"], counters["packets"]


def _figures(path: str, ours: Sequence[Stream], plain: Sequence[Stream]) -> list[Figure]:
    """Return both ratios. Each is plain over ours or ours over plain: more is worse."""
    packets = [statistics.median(one.bytes_per_packet for one in each) for each in (ours, plain)]
    rates = [[one.mbit_s for one in each] for each in (ours, plain)]
    costs = [[one.cpu_s_per_gb for one in each] for each in (ours, plain)]
    return [
        _ratio(
            f"{path}: rate of a plain tap over ours",
            *(rates[1], rates[0], 1 / SLOWEST),
            f"{statistics.median(rates[0]):.0f} Mbit/s against {statistics.median(rates[1]):.0f}, "
            f"{packets[0] / 1000:.1f} kB a packet against {packets[1] / 1000:.1f}",
        ),
        _ratio(
            f"{path}: CPU per gigabyte over that of a plain tap",
            *(costs[0], costs[1], COSTLIEST),
            f"{statistics.median(costs[0]):.2f} s against {statistics.median(costs[1]):.2f}",
        ),
    ]


def _ratio(
    name: str, above: Sequence[float], below: Sequence[float], bound: float, note: str
) -> Figure:
    """Return the ratio of the medians; its spread is that of the rounds."""
    rounds = [a / b for a, b in zip(above, below, strict=True)]
    quarters = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else rounds * 3
    value = statistics.median(above) / statistics.median(below)
    low, high = round(quarters[0], 3), round(quarters[2], 3)
    return Figure(name, round(value, 3), "x", round(bound, 3), len(rounds), low, high, note)
