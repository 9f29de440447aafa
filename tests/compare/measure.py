"""Measures one program of `make compare` in the tree of the working directory, in rounds.

`python -P measure.py NAME` with PYTHONPATH=TREE starts the services of the program. Once they run,
it writes an empty JSON object. For each line of its input it measures one round and writes a JSON
object: lists of figures by their source (bench, storm, load, instructions). It ends with its input.
All trees run this file, each with its own Python and its own services. So sizes and clocks are the
same for all. Only names that all trees have are used.
"""

import asyncio
import itertools
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.bench import measures
from tests.bench.figures import as_json
from tests.bench.netd_growth import netd_growth
from tests.bench.stage import IMAGE, VIRTBUS, Stage, stage
from tests.load import phases
from tests.load.crowd import Crowd
from tests.load.meters import line
from tests.load.services import Service
from tests.load.world import Shape, World, world

NETWORKS = (("default", "built-in network"), ("bench", "CNI bridge"))
OURS = ("controller", "imaged", "netd", "nodeagent")
HOPS = 150
IDLE_S = 1.0
GUESTS = 6
HELD = 10
LOAD = Shape(vms=400, nodes=20, in_flight=64, controllers=1, churn_s=2.0)
BATCH = 256
FEW, MANY = 40, 160
"""VMs whose instructions are counted. The difference leaves out what a service does only once."""
COUNTED = ("controller", "simulated")
COUNTER = ("valgrind", "-q", "--tool=cachegrind", "--cache-sim=no")

Lines = dict[str, list[str]]
Rounds = AsyncGenerator[Lines, None]
Program = Callable[[], Rounds]


class Clocks:
    """Exact CPU clocks of processes with all their descendants: a control group for each.

    /proc has the time of ended children in ticks of 10 ms.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cpu_s(self, pid: int) -> float:
        """Return the CPU time of a process and its descendants since the first call."""
        group = self._folder / str(pid)
        if not group.exists():
            group.mkdir()
            (group / "cgroup.procs").write_text(str(pid))
        words = (group / "cpu.stat").read_text().split()
        return int(words[words.index("usage_usec") + 1]) / 1e6


@contextmanager
def clocks() -> Iterator[Clocks]:
    """Clocks, whose control groups are removed after the processes have ended."""
    hybrid = Path("/sys/fs/cgroup/unified")
    folder = (hybrid if hybrid.exists() else hybrid.parent) / f"virtbus-compare-{os.getpid()}"
    folder.mkdir()
    try:
        yield Clocks(folder)
    finally:
        for group in (*folder.glob("*/"), folder):
            group.rmdir()


def _bench(name: str, value: float) -> str:
    return json.dumps({"name": name, "value": value})


async def host() -> Rounds:
    """One host with one guest at a time: the time and the CPU of a create and of a command."""
    with clocks() as exact:
        async with stage() as here:
            pids = here.pids()

            def spent_s() -> dict[str, float]:
                return {name: exact.cpu_s(pid) for name, pid in pids.items()}

            for network, _ in NETWORKS:
                await here.delete((await here.create(network))[1])
            yield {}
            idle_s = dict.fromkeys(pids, 0.0)
            for number in itertools.count(1):
                before = spent_s()
                await asyncio.sleep(IDLE_S)
                idle_s = {
                    name: idle_s[name] + cpu - before[name] for name, cpu in spent_s().items()
                }
                # The mean of all rounds: a single second has a heartbeat or none.
                idle = {name: cpu / (number * IDLE_S) for name, cpu in idle_s.items()}
                found = [_bench("request and answer over the bus", await _hops_ms(here))]
                for network, label in NETWORKS:
                    before, begun_s = spent_s(), time.perf_counter()
                    took_s, uid = await here.create(network)
                    await asyncio.sleep(measures.TAIL_S)
                    lasted_s = time.perf_counter() - begun_s
                    cpu = {
                        name: (now - before[name] - idle[name] * lasted_s) * 1000
                        for name, now in spent_s().items()
                    }
                    gone_s = await here.delete(uid)
                    nats, ours = cpu["nats-server"], sum(cpu.get(name, 0.0) for name in OURS)
                    found += [
                        _bench(f"create to told Running, {label}", took_s),
                        _bench(f"delete to told gone, {label}", gone_s),
                        _bench(f"CPU of our services per create, {network} network", ours),
                        _bench(f"CPU of nats-server per create, {network} network", nats),
                    ]
                yield {"bench": found + await _command(here)}


async def _hops_ms(here: Stage) -> float:
    took_s = []
    for _ in range(HOPS):
        begun_s = time.perf_counter()
        await here.bus.request("virtbus.api.v1.node.list", {}, timeout_s=5)
        took_s.append(time.perf_counter() - begun_s)
    return statistics.median(took_s) * 1000


async def _command(here: Stage) -> list[str]:
    """Run `virtbus vm create --wait running`; return its duration and the CPU of its process."""
    env = {**os.environ, "VIRTBUS_CREDS": str(next(here.folder.rglob("bus.creds")))}
    name = f"cli-{time.monotonic_ns()}"
    words = [VIRTBUS, "vm", "create", name, "--image", IMAGE, "--memory", "64MiB"]
    words += ["--wait", "running", "-o", "json"]
    before_s, begun_s = _children_s(), time.perf_counter()
    await asyncio.to_thread(subprocess.run, words, env=env, check=True, stdout=subprocess.DEVNULL)
    took_s, cpu_s = time.perf_counter() - begun_s, _children_s() - before_s
    view = await here.bus.request("virtbus.api.v1.vm.get", {"name": name}, timeout_s=5)
    here.made.append(view["uid"])
    await here.delete(view["uid"])
    return [
        _bench("virtbus vm create --wait running", took_s),
        _bench("CPU of virtbus vm create --wait running", cpu_s * 1000),
    ]


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def fast() -> Rounds:
    """Creates without queries of QEMU's CPU models."""
    async with stage(VIRTBUS_FAST_START="true") as here:
        for network, _ in NETWORKS:
            await here.delete((await here.create(network))[1])
        yield {}
        while True:
            found = []
            for network, label in NETWORKS:
                took_s, uid = await here.create(network)
                await here.delete(uid)
                found.append(_bench(f"create to told Running, {label}, no CPU queries", took_s))
            yield {"bench": found}


async def burst() -> Rounds:
    """Guests that are all created, and started, at once on one host."""
    with clocks() as exact:
        async with stage() as here:
            pids = here.pids()
            await here.delete((await here.create())[1])
            yield {}
            while True:
                crowd = Crowd(here, GUESTS, 64)
                creates_s = await crowd.create()
                await crowd.stop()
                before = {name: exact.cpu_s(pid) for name, pid in pids.items()}
                starts_s = await crowd.start()
                cpu = {n: (exact.cpu_s(pid) - before[n]) * 1000 for n, pid in pids.items()}
                await crowd.stop()
                await crowd.delete()
                each = {name: cpu_ms / GUESTS for name, cpu_ms in cpu.items()}
                found = [line("creates", per_s=GUESTS / creates_s)]
                found.append(line("starts", per_s=GUESTS / starts_s, cpu_ms_per_vm=each))
                yield {"storm": found}


async def many() -> Rounds:
    """Batches of creates, and of deletes, on simulated nodes that have VMs already."""
    async with world(LOAD) as here:
        await _resident(here)
        yield {}
        while True:
            creates = await phases.creates(here, BATCH, _silent)
            deletes = await phases.deletes(here, _silent)
            here.population.vms.clear()
            for name in ("pss_mib", "pss_kib_per_vm"):
                creates.pop(name, None)
            yield {"load": [line("creates", **creates), line("deletes", **deletes)]}


async def churn() -> Rounds:
    """Creates and deletes while a controller is killed."""
    async with world(LOAD) as here:
        await phases.creates(here, LOAD.vms, _silent)
        yield {}
        while True:
            yield {"load": [line("churn", **await phases.churn(here, _silent))]}


async def _resident(here: World) -> None:
    """Make VMs that the rounds neither count nor delete."""
    await phases.creates(here, LOAD.vms, _silent)
    here.population.vms.clear()


async def memory() -> Rounds:
    """The memory of services that have just started and then made their first VMs."""
    yield {}
    while True:
        async with stage() as here:
            found = [as_json(figure) for figure in await measures.memory(here, HELD)]
        async with world(LOAD) as simulated:
            await phases.idle(simulated, IDLE_S)
            creates = await phases.creates(simulated, LOAD.vms, _silent)
        sizes = {name: creates[name] for name in ("pss_mib", "pss_kib_per_vm")}
        yield {"bench": found, "load": [line("creates", **sizes)]}


async def ten() -> Rounds:
    """Ten creates at once."""
    async with stage() as here:
        raw = await measures.raw_of(here)
        yield {}
        while True:
            yield {"bench": [as_json(one) for one in await measures.ten_at_once(here, raw, 1)]}


async def netd() -> Rounds:
    """The network of the 300th VM."""
    yield {}
    while True:
        async with stage() as here:
            found = [as_json(figure) for figure in await netd_growth(here)]
        yield {"bench": found}


async def instructions() -> Rounds:
    """The machine instructions of a create, and of a create and a delete.

    CPU time grows with other load of the machine, in bursts by a half. Instructions do not.
    """
    if shutil.which(COUNTER[0]) is None:
        raise SystemExit(f"no {COUNTER[0]} here; install its package")
    yield {}
    while True:
        lines = []
        for name, to_the_end in (("create", False), ("create and delete", True)):
            few, many = [await _instructions(vms, to_the_end=to_the_end) for vms in (FEW, MANY)]
            each = {one: (many[one] - few[one]) / (MANY - FEW) / 1e6 for one in few}
            lines.append(line(name, million_per_vm=each))
        yield {"instructions": lines}


async def _instructions(vms: int, *, to_the_end: bool) -> dict[str, int]:
    """Return the instructions that each service executed in a run with few nodes."""
    with tempfile.TemporaryDirectory() as name, _counting(Path(name)):
        async with world(Shape(vms=vms, nodes=2, in_flight=8, controllers=1)) as here:
            await phases.idle(here, IDLE_S)
            await phases.creates(here, vms, _silent)
            if to_the_end:
                await phases.deletes(here, _silent)
        found = {}
        for file in Path(name).iterdir():
            total = re.search(r"^summary: (\d+)", file.read_text(errors="replace"), re.MULTILINE)
            assert total is not None, f"no count of {file.name}"
            found[file.name.partition("-")[0]] = int(total[1])
        return found


def _silent(_text: str) -> None:
    return


@contextmanager
def _counting(folder: Path) -> Iterator[None]:
    """Count the instructions of services that start meanwhile; their ends write the files."""
    start = Service.start

    def counted(service: Service) -> None:
        name = Path(service._notify).stem
        if name.startswith(COUNTED) and COUNTER[0] not in service._argv:
            at = service._argv.index(sys.executable)
            service._argv[at:at] = [*COUNTER, f"--cachegrind-out-file={folder / name}"]
        start(service)

    with (
        patch.object(Service, "start", counted),
        patch.dict(os.environ, {"PYTHONHASHSEED": "0"}),
    ):
        yield


PROGRAMS: dict[str, Program] = {
    "host": host,
    "fast": fast,
    "storm": burst,
    "load": many,
    "churn": churn,
    "memory": memory,
    "ten": ten,
    "netd": netd,
    "instructions": instructions,
}


async def rounds(program: Program) -> None:
    """Measure a round for each line of the input."""
    async with aclosing(program()) as measured:
        async for lines in measured:
            sys.stdout.write(json.dumps(lines) + "\n")
            sys.stdout.flush()
            if not await asyncio.to_thread(sys.stdin.readline):
                break


def main() -> None:
    os.environ.pop("PYTHONPATH")  # the tree's processes start as they always do
    asyncio.run(rounds(PROGRAMS[sys.argv[1]]))


if __name__ == "__main__":
    main()
