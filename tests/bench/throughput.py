"""TCP streams between guests, and between a guest and its host, against QEMU with plain taps."""

import asyncio
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure
from tests.bench.measures import cpu_s
from tests.bench.plain_guests import plain_guests
from tests.bench.stage import IMAGE, Stage, stage
from tests.e2e.login import Login
from tests.e2e.platform import is_ready

from virtbus.bus.runtime.ids import uuid7

PORT, SECONDS = 5001, 4
GIGABYTE = 10**9
SLOWEST, COSTLIEST = 0.85, 1.2
READY_S = 120.0
"""The guests are ready within this, on a busy machine without KVM."""
PATHS = ("guest to guest", "guest to host", "host to guest")

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running guests on one network, and the pids of their QEMUs."""

    views: Sequence[View]
    pids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream's rate, and the CPU time of all QEMUs and programs of the host for it."""

    mbit_s: float
    cpu_s_per_gb: float


async def throughput(disk: Path, runs: int) -> list[Figure]:
    """Return the rate and the CPU per gigabyte of each path, as ratios; interleaved with plain."""
    async with stage(disk) as here:
        return await _on(here, disk, runs)


async def _on(here: Stage, disk: Path, runs: int) -> list[Figure]:
    folder = here.folder / "raw"
    folder.mkdir(mode=0o711, exist_ok=True)
    login = Login(folder)
    key = Path(login.public_key).read_text(encoding="utf-8").strip()
    program = folder / "stream"
    source = Path(__file__).with_name("stream.c")
    build = ["gcc", "-std=gnu11", "-O2", "-static", "-s", "-o", str(program), str(source)]
    await asyncio.to_thread(lambda: subprocess.run(build, check=True))
    ours = await _vms(here, key)

    def measured() -> list[Figure]:
        with plain_guests(folder, disk, key, ours.pids[0]) as guests:
            plain = Pair([one.view for one in guests], [one.pid for one in guests])
            pairs = (ours, plain)
            for view in (*ours.views, *plain.views):
                login.give(view, program.read_bytes(), "/root/stream")
            return [
                figure for path in PATHS for figure in _compared(path, pairs, login, program, runs)
            ]

    return await asyncio.to_thread(measured)


async def _vms(here: Stage, key: str) -> Pair:
    """Create two VMs; return them once their guests are ready."""
    uids = []
    for name in ("stream-a", "stream-b"):
        uids.append(uuid7())
        ready = here.watch.expect(uids[-1], lambda vm: is_ready({"conditions": (), **vm}))
        request = {
            "uid": uids[-1],
            "name": name,
            "image": IMAGE,
            "memory": "128MiB",
            "ssh_keys": [key],
        }
        await here.bus.request("virtbus.api.v1.vm.create", request, timeout_s=30)
        here.made.append(uids[-1])
        async with asyncio.timeout(READY_S):
            await ready
    get = "virtbus.api.v1.vm.get"
    views = [await here.bus.request(get, {"uid": uid}, timeout_s=5) for uid in uids]
    return Pair(views, [_pid_of(uid) for uid in uids])


def _pid_of(uid: str) -> int:
    return int(Path(f"/run/libvirt/qemu/vb-{uid}.pid").read_text())


def _compared(
    path: str, pairs: Sequence[Pair], login: Login, program: Path, runs: int
) -> list[Figure]:
    found: list[list[Stream]] = [[], []]
    for _ in range(runs):
        for pair, streams in zip(pairs, found, strict=True):
            streams.append(_stream(path, pair, login, program))
    return _figures(path, *found)


def _stream(path: str, pair: Pair, login: Login, program: Path) -> Stream:
    """Send for SECONDS. The guest that listens is asked first, and its peer tries until it does.

    Guests may not open connections to their host. So the host connects in both directions.
    """
    first, second = pair.views
    at = second["interfaces"][0]["addresses"][0].partition("/")[0]
    into, out = "receive", "send"
    if path == "guest to host":
        into, out = out, into
    listener = login.start(second, f"/root/stream listen {PORT} {into} {SECONDS}")
    words = ("connect", at, str(PORT), out, str(SECONDS))
    if path == "guest to guest":
        connector = login.start(first, " ".join(("/root/stream", *words)))
        programs = []
    else:
        connector = subprocess.Popen([program, *words], stdout=subprocess.PIPE, text=True)
        programs = [connector.pid]
    receiver = connector if out == "receive" else listener
    pids = [*pair.pids, *programs]
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "begin\n"
    before = {pid: cpu_s(pid) for pid in pids}
    _, size, took_ns = receiver.stdout.readline().split()
    spent = sum(cpu_s(pid) - before[pid] for pid in pids)
    for process in (listener, connector):
        assert process.wait(60) == 0
    return Stream(int(size) * 8e3 / int(took_ns), spent / int(size) * GIGABYTE)


def _figures(path: str, ours: Sequence[Stream], plain: Sequence[Stream]) -> list[Figure]:
    """Return both ratios. Each is plain over ours or ours over plain: more is worse."""
    rates = [statistics.median(one.mbit_s for one in streams) for streams in (ours, plain)]
    costs = [statistics.median(one.cpu_s_per_gb for one in streams) for streams in (ours, plain)]
    return [
        Figure(
            f"{path}: rate of a plain tap over ours",
            round(rates[1] / rates[0], 3),
            "x",
            round(1 / SLOWEST, 3),
            len(ours),
            note=f"{rates[0]:.0f} Mbit/s against {rates[1]:.0f}",
        ),
        Figure(
            f"{path}: CPU per gigabyte over that of a plain tap",
            round(costs[0] / costs[1], 3),
            "x",
            COSTLIEST,
            len(ours),
            note=f"{costs[0]:.2f} s against {costs[1]:.2f}",
        ),
    ]
