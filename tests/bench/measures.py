"""Measures: each function takes a stage and returns figures."""

import asyncio
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import libvirt
from tests.bench.figures import Figure, median_of, ratio_of
from tests.bench.rawvirt import RawVirt
from tests.bench.stage import IMAGE, VIRTBUS, Stage

TICK = os.sysconf("SC_CLK_TCK")
_CPUCLOCK_SCHED = 2
"""clock_getcpuclockid(3): another process's CPU clock."""
HELD_AT_MOST, SETTLE_S = 10, 4.0
TAIL_S = 0.3
"""Seconds after the answer in which events and spans still count as part of the create."""
CLI_OVER_RAW_S = 0.180
"""The time that virt-install adds to raw libvirt."""


async def raw_of(stage: Stage) -> RawVirt:
    """Raw libvirt, with the XML of one of the platform's own VMs."""
    _, uid = await stage.create()
    connection = libvirt.open("qemu:///system")
    template = connection.lookupByUUIDString(uid).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    folder = stage.folder / "raw"
    folder.mkdir(mode=0o711, exist_ok=True)
    folder.chmod(0o777)
    raw = RawVirt(folder, template)
    await asyncio.to_thread(lambda: raw.destroy(raw.start(raw.prepare())[1]))  # warm
    await stage.delete(uid)
    return raw


async def create_and_delete(
    stage: Stage, raw: RawVirt, network: str, runs: int, *, bound: float, label: str
) -> list[Figure]:
    """Request until Running is reported, delete until gone is reported; interleaved with raw."""
    ours, floor, ends, raw_ends = [], [], [], []
    await stage.delete((await stage.create(network))[1])  # warm
    for _ in range(runs):
        xml = await asyncio.to_thread(raw.prepare)
        took, domain = await asyncio.to_thread(raw.start, xml)
        raw_ends.append(await asyncio.to_thread(raw.destroy, domain))
        floor.append(took)
        took, uid = await stage.create(network)
        ours.append(took)
        ends.append(await stage.delete(uid))
    over = [(a - b) * 1000 for a, b in zip(ends, raw_ends, strict=True)]
    return [
        ratio_of(f"create to told Running, {label}", ours, floor, bound),
        median_of(f"delete to told gone over raw destroy, {label}", over, "ms", bound=50),
    ]


async def steps(stage: Stage, runs: int) -> list[Figure]:
    """The steps of a create: the median of each span of its trace."""
    took: dict[str, list[float]] = {}
    for _ in range(runs):
        _, uid = await stage.create()
        await asyncio.sleep(0.5)  # spans are published after the answer
        request = {"uid": uid, "spans": True}
        page = await stage.bus.request("virtbus.api.v1.vm.events", request, timeout_s=5)
        for item in page["items"]:
            span = item["data"]
            if "start_ns" in span:
                name = f"{span.get('service', '')}: {span['name']}"
                took.setdefault(name, []).append((span["end_ns"] - span["start_ns"]) / 1e6)
        await stage.delete(uid)
    return [median_of(f"step {name}", values, "ms") for name, values in sorted(took.items())]


async def ten_at_once(stage: Stage, raw: RawVirt, runs: int) -> list[Figure]:
    """Ten creates together against ten raw starts at the best concurrency; then ten deletes."""
    ours, floor, ends = [], [], []
    for _ in range(runs):
        best = [await asyncio.to_thread(_raw_burst, raw, threads) for threads in (2, 4)]
        floor.append(min(best))
        for path in raw.folder.iterdir():
            path.unlink()
        begun = time.perf_counter()
        uids = await _together(stage, 10)
        ours.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for uid in uids:
                group.create_task(stage.delete(uid))
        ends.append(time.perf_counter() - begun)
    throughput = [b / a for a, b in zip(ours, floor, strict=True)]
    worst = 1 / (sum(throughput) / len(throughput))
    return [
        ratio_of("ten at once, all told Running", ours, floor, 1.2),
        Figure(
            "throughput against raw, inverse", round(worst, 3), "x raw", round(1 / 0.85, 3), runs
        ),
        median_of("ten deletes at once, all told gone", ends, "s", bound=1.0),
    ]


def _raw_burst(raw: RawVirt, threads: int) -> float:
    """Return the seconds of ten raw starts, with so many at a time."""
    xmls = [raw.prepare() for _ in range(10)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        domains = [domain for _, domain in pool.map(raw.start, xmls)]
    took = time.perf_counter() - begun
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(raw.destroy, domains))
    return took


async def _together(stage: Stage, count: int) -> list[str]:
    uids: list[str] = []

    async def one() -> None:
        uids.append((await stage.create())[1])

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    return uids


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # ns, ended threads included
    return own + sum(int(field) for field in fields[13:15]) / TICK


def pss_mib(pid: int) -> float:
    """Return the proportional set size."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024
    )


async def cpu_per_create(stage: Stage, network: str, runs: int, bound: float) -> list[Figure]:
    """CPU of all our processes for a create, from the request to TAIL_S after the answer."""
    pids = stage.pids()
    wrapper_ms = await asyncio.to_thread(wrapper_start_ms, stage)
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    idle_begun = time.perf_counter()
    await asyncio.sleep(4)
    idle = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    idle_s = time.perf_counter() - idle_begun
    spent = dict.fromkeys(pids, 0.0)
    for _ in range(runs):  # few deletes in between: netd cleans up for seconds after a release
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        begun = time.perf_counter()
        await stage.create(network)
        await asyncio.sleep(TAIL_S)
        lasted = time.perf_counter() - begun
        for name, pid in pids.items():
            spent[name] += cpu_s(pid) - before[name] - idle[name] * lasted / idle_s
        if len(stage.made) == HELD_AT_MOST:
            await stage.clear()
            await asyncio.sleep(SETTLE_S)
    await stage.clear()
    each = {name: value / runs * 1000 for name, value in spent.items()}
    ours = sum(v for name, v in each.items() if name not in {"nats-server", "cli"})
    note = ", ".join(f"{name} {value:.1f}" for name, value in sorted(each.items()))
    return [
        Figure(
            f"platform CPU per create, {network} network",
            round(ours + wrapper_ms, 1),
            "ms",
            bound,
            runs,
            note=f"{note}, wrapper {wrapper_ms:.1f}",
        ),
        Figure(
            f"nats-server CPU per create, {network} network",
            round(each.get("nats-server", 0.0), 1),
            "ms",
            None,
            runs,
        ),
    ]


def wrapper_start_ms(stage: Stage, runs: int = 40) -> float:
    """CPU of a start of the wrapper without its successor: the wrapper's probe path runs `true`."""
    wrapper = next(stage.folder.rglob("libexec/vmwrapper"), None)
    if wrapper is None:
        return 0.0
    took = []
    for argv in ([str(wrapper), "--version"], ["/usr/bin/qemu-system-x86_64", "--version"]):
        before = os.times()
        for _ in range(runs):
            subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        cpu = (after.children_user + after.children_system) - (
            before.children_user + before.children_system
        )
        took.append(cpu / runs * 1000)
    return max(took[0] - took[1], 0.0)


async def memory(stage: Stage, count: int) -> list[Figure]:
    """PSS of each process, and the growth of all our processes per VM."""
    before = {name: pss_mib(pid) for name, pid in stage.pids().items()}
    uids = await _together(stage, count)
    await asyncio.sleep(1)
    after = {name: pss_mib(pid) for name, pid in stage.pids().items()}
    ours = [name for name in after if name not in {"nats-server", "cli"}]
    added = sum(after[name] - before.get(name, 0) for name in ours) / count
    for uid in uids:
        await stage.delete(uid)
    figures = [Figure("memory per VM, all our processes", round(added, 3), "MiB PSS", 1.0, count)]
    figures += [
        Figure(f"memory of {name}", round(value, 1), "MiB PSS")
        for name, value in sorted(after.items())
    ]
    return figures


async def bus_hops(stage: Stage, runs: int = 200) -> list[Figure]:
    """A request that only reads the controller's cache: client, server, controller and back."""
    took = []
    for _ in range(runs):
        begun = time.perf_counter()
        await stage.bus.request("virtbus.api.v1.node.list", {}, timeout_s=5)
        took.append((time.perf_counter() - begun) * 1000)
    return [median_of("request and answer over the bus", took, "ms")]


async def command(stage: Stage, raw: RawVirt, runs: int) -> list[Figure]:
    """The whole `virtbus vm create --wait running` against raw plus virt-install's overhead."""
    creds = next(stage.folder.rglob("bus.creds"))
    env = {**os.environ, "VIRTBUS_CREDS": str(creds)}
    over = []
    for run in range(runs):
        xml = await asyncio.to_thread(raw.prepare)
        floor, domain = await asyncio.to_thread(raw.start, xml)
        await asyncio.to_thread(raw.destroy, domain)
        name = f"cli{run}"
        argv = [
            VIRTBUS,
            "vm",
            "create",
            name,
            "--image",
            IMAGE,
            "--memory",
            "64MiB",
            "--wait",
            "running",
            "-o",
            "json",
        ]
        begun = time.perf_counter()
        await asyncio.to_thread(
            subprocess.run, argv, env=env, check=True, stdout=subprocess.DEVNULL
        )
        over.append((time.perf_counter() - begun - floor) * 1000)
        view = await stage.bus.request("virtbus.api.v1.vm.get", {"name": name}, timeout_s=5)
        stage.made.append(view["uid"])
        await stage.delete(view["uid"])
    bound = CLI_OVER_RAW_S * 1000
    return [median_of("virtbus vm create --wait running, over raw", over, "ms", bound=bound)]
