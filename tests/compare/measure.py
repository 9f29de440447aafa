"""Runs one program of `make compare` in the tree of the working directory.

`python -P measure.py NAME FILE` with PYTHONPATH=TREE writes a list of lines for each source of
figures: bench, storm and load. All trees run this file, each with its own Python and its own
measures. So sizes and clocks are the same for all. Only names that all trees have are used.
"""

import asyncio
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.bench import measures
from tests.bench.figures import Figure, as_json
from tests.bench.netd_growth import netd_growth
from tests.bench.stage import Stage, stage
from tests.load import __main__ as load
from tests.load import phases
from tests.load.meters import line
from tests.load.services import Service
from tests.load.storm import storm
from tests.load.world import Shape, World, world

CREATES, CPU_CREATES, COMMANDS = 3, 5, 3
"""Repetitions. The median of creates is compared with raw libvirt; CPU is a sum over creates."""
TENS = 3
WRAPPER_STARTS = 20
GUESTS, STORMS = 6, 2
LOAD = Shape(vms=800, nodes=20, in_flight=256, controllers=1, churn_s=2.0)
IDLE_S = 1.0
"""The idle phases of the load are not judged."""
FEW, MANY = 40, 160
"""VMs whose instructions are counted. The difference leaves out what a service does only once."""
COUNTED = ("controller", "simulated")
COUNTER = ("valgrind", "-q", "--tool=cachegrind", "--cache-sim=no")

Lines = dict[str, list[str]]
Program = Callable[[], Coroutine[None, None, Lines]]


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


def wrapper_start_ms(stage: Stage, runs: int = WRAPPER_STARTS) -> float:
    """As the bench's function of that name, with an exact clock."""
    wrapper = next(stage.folder.rglob("libexec/vmwrapper"), None)
    if wrapper is None:
        return 0.0
    took = []
    for argv in ([str(wrapper), "--version"], ["/usr/bin/qemu-system-x86_64", "--version"]):
        before = _children_s()
        for _ in range(runs):
            subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
        took.append((_children_s() - before) / runs * 1000)
    return max(took[0] - took[1], 0.0)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def host() -> Lines:
    """One host: memory first, because creates add to it, then the rest, and a storm."""
    found: list[Figure] = []
    with clocks() as exact:
        async with stage() as here:
            measures.cpu_s, measures.wrapper_start_ms = exact.cpu_s, wrapper_start_ms
            raw = await measures.raw_of(here)
            found += await measures.memory(here, 10)
            found += await measures.bus_hops(here)
            found += await measures.command(here, raw, COMMANDS)
            for network, label in (("default", "built-in network"), ("bench", "CNI bridge")):
                found += await measures.create_and_delete(
                    here, raw, network, CREATES, bound=1.15, label=label
                )
                found += await measures.cpu_per_create(here, network, CPU_CREATES, 0)
            stormed = (await storm(here, GUESTS, STORMS)).figures()
        found += await _fast()
    return {
        "bench": [as_json(figure) for figure in found],
        "storm": [line(name, **values) for name, values in stormed.items()],
    }


async def _fast() -> list[Figure]:
    found = []
    async with stage(VIRTBUS_FAST_START="true") as here:
        raw = await measures.raw_of(here)
        for network, label in (("default", "built-in"), ("bench", "CNI bridge")):
            found += await measures.create_and_delete(
                here, raw, network, CREATES, bound=1.20, label=f"{label}, no CPU queries"
            )
    return found


async def many() -> Lines:
    """Hundreds of VMs on simulated nodes."""
    idle = phases.idle

    async def short(world: World, seconds: float) -> phases.Figures:
        return await idle(world, min(seconds, IDLE_S))

    phases.idle = short
    figures, _ = await load.run(LOAD, to_the_end=True)
    return {"load": [line(name, **values) for name, values in figures.items()]}


async def ten() -> Lines:
    """Ten creates at once."""
    async with stage() as here:
        found = await measures.ten_at_once(here, await measures.raw_of(here), TENS)
    return {"bench": [as_json(figure) for figure in found]}


async def netd() -> Lines:
    """The network of the 300th VM."""
    async with stage() as here:
        return {"bench": [as_json(figure) for figure in await netd_growth(here)]}


async def instructions() -> Lines:
    """The machine instructions of a create, and of a create and a delete.

    CPU time grows with other load of the machine, in bursts by a half. Instructions do not.
    """
    if shutil.which(COUNTER[0]) is None:
        raise SystemExit(f"no {COUNTER[0]} here; install its package")
    lines = []
    for name, to_the_end in (("create", False), ("create and delete", True)):
        few, many = [await _instructions(vms, to_the_end=to_the_end) for vms in (FEW, MANY)]
        each = {one: (many[one] - few[one]) / (MANY - FEW) / 1e6 for one in few}
        lines.append(line(name, million_per_vm=each))
    return {"instructions": lines}


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
    "load": many,
    "ten": ten,
    "netd": netd,
    "instructions": instructions,
}


def main() -> None:
    os.environ.pop("PYTHONPATH")  # the tree's processes start as they always do
    name, path = sys.argv[1:]
    Path(path).write_text(json.dumps(asyncio.run(PROGRAMS[name]())))


if __name__ == "__main__":
    main()
