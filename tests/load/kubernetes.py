"""`python -m tests.load.kubernetes`: VMs applied to a real API server, with the bridge between.

It prints JSON lines, then a table. The nodes are simulated; every process runs on this machine.
The API server's own metrics count the writes of VMs, VMIs and events, without the user's own.
"""

import argparse
import asyncio
import copy
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml
from tests.kubernetes.cluster import CRDS, programs
from tests.kubernetes.cluster import Cluster as ControlPlane
from tests.kubernetes.platform import SMOKE, Platform, bridged, until
from tests.load.meters import cpu_s, line, memory_kib, percentiles

from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.runtime.controller import VM, VMI
from virtbus.kubebridge.edge import cluster
from virtbus.kubebridge.edge.cluster import KubernetesApi, Scope, StatusError

NAMESPACE = "load"
WRITES_MAX, P50_MS_MAX, PSS_MIB_MAX, KIB_PER_VM_MAX = 8.0, 1000.0, 110.0, 20.0
WITHIN_S = 600.0
COUNTED = re.compile(
    r'^apiserver_request_total\{(?=[^}]*verb="(POST|PUT|PATCH|APPLY|DELETE)")'
    r'(?=[^}]*resource="(virtualmachines|virtualmachineinstances|events)")[^}]*\} (\S+)$',
    re.MULTILINE,
)

Json = dict[str, Any]


@dataclass
class Crowd:
    """VMs by name: the time of each request, and the time when its status was Running."""

    api: KubernetesApi
    asked_s: dict[str, float] = field(default_factory=dict)
    running_s: dict[str, float] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    async def follow(self) -> None:
        """Record the events of a user's watch; restart a broken watch."""
        pages = [page async for page in self.api.pages(VM, Scope(NAMESPACE))]
        version = pages[-1].resource_version
        while True:
            try:
                async for event in self.api.watch(VM, version):
                    version = event.object["metadata"]["resourceVersion"]
                    self._note(event.type, event.object)
            except StatusError:
                await asyncio.sleep(0.1)

    def _note(self, kind: str, vm: Json) -> None:
        name = vm["metadata"].get("name", "")
        if kind == "DELETED":
            self.gone.add(name)
        elif vm.get("status", {}).get("printableStatus") == "Running":
            self.running_s.setdefault(name, time.monotonic())

    async def apply(self, name: str, body: Json) -> None:
        vm = copy.deepcopy(body)
        vm["metadata"]["name"] = name
        self.asked_s[name] = time.monotonic()
        await self.api.create(VM, vm, NAMESPACE)

    def waits_ms(self) -> dict[str, float]:
        return percentiles([self.running_s[n] - s for n, s in self.asked_s.items()
                            if n in self.running_s])  # fmt: skip


async def creates(
    crowd: Crowd, names: list[str], rate: float, midway: Callable[[], Awaitable[None]] | None
) -> float:
    """Apply them, `rate` a second (0: all at once), until all run; return the seconds."""
    body = yaml.safe_load(SMOKE.read_text())
    begun = time.monotonic()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        for number, name in enumerate(names):
            if rate:
                await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            group.create_task(crowd.apply(name, body))
            if midway and number == len(names) // 2:
                group.create_task(_run(midway))
    async with asyncio.timeout(WITHIN_S):
        while len(crowd.running_s) < len(names):
            await asyncio.sleep(0.05)
    return time.monotonic() - begun


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def phase(platform: Platform, names: list[str], rate: float, *, kill: bool) -> dict[str, Any]:
    """Run one crowd from its first apply to all running."""

    async def killed() -> None:
        await platform.bridge.killed_and_ready()

    async with cluster.connect(platform.cluster.kubeconfig) as api, background() as tasks:
        crowd = Crowd(api)
        tasks.start(crowd.follow())
        await asyncio.sleep(0.5)
        before, spent = await written(platform), cpu(platform)
        took_s = await creates(crowd, names, rate, killed if kill else None)
        await asyncio.sleep(2)
        after = await written(platform)
        return {
            "vms": len(names),
            "seconds": round(took_s, 2),
            "apply_to_running_ms": crowd.waits_ms(),
            "writes_per_vm": round((after - before) / len(names) - 1, 2),
            "cpu_ms_per_vm": {
                name: round(
                    (now_s - (0 if kill and name == "bridge" else spent[name])) * 1000 / len(names),
                    1,
                )
                for name, now_s in cpu(platform).items()
            },
        }


def cpu(platform: Platform) -> dict[str, float]:
    """Return the CPU seconds of each program so far."""
    control = platform.cluster
    pids = {
        "apiserver": control.apiserver.pid,
        "etcd": control.etcd.pid,
        "kube controllers": control.controllers.pid,
        "bridge": platform.bridge.pid,
        "controller": platform.controller.pid,
        "nodes": platform.simulated.pid,
        "nats": platform.nats.pid,
    }
    return {name: cpu_s(pid) for name, pid in pids.items()} | {"client": time.process_time()}


async def written(platform: Platform) -> float:
    """Return the API server's count of writes to these kinds."""
    text = await asyncio.to_thread(platform.cluster.kubectl, "get", "--raw", "/metrics")
    return sum(float(count) for _, _, count in COUNTED.findall(text))


async def sets(platform: Platform) -> tuple[set[str], set[str]]:
    """Return the uids of the VMIs, and of the VMs on the bus."""
    async with cluster.connect(platform.cluster.kubeconfig) as api:
        vmis = [one async for page in api.pages(VMI, Scope(NAMESPACE)) for one in page.items]
    found = await asyncio.to_thread(platform.vms, NAMESPACE)
    return {one["metadata"]["uid"] for one in vmis}, {one["uid"] for one in found.values()}


def deletes(platform: Platform) -> dict[str, Any]:
    """Delete all; return the seconds until nothing is left on either side."""
    begun = time.monotonic()
    platform.cluster.kubectl("delete", "vm", "--all", "-n", NAMESPACE, "--wait=false")
    until(
        "nothing is left",
        lambda: all(not found for found in asyncio.run(sets(platform))),
        timeout_s=WITHIN_S,
    )
    return {"seconds": round(time.monotonic() - begun, 2)}


def run(platform: Platform, vms: int, rate: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run every phase, and measure its cost."""
    idle_kib = memory_kib(platform.bridge.pid)
    yield "idle", {"pss_mib": round(idle_kib / 1024, 1)}
    for name, at, kill in (("rate", rate, False), ("at once", 0.0, False), ("killed", rate, True)):
        names = [f"{name.replace(' ', '-')}-{number:04d}" for number in range(vms)]
        figures = asyncio.run(phase(platform, names, at, kill=kill))
        pss_kib = memory_kib(platform.bridge.pid)
        vmis, on_bus = asyncio.run(sets(platform))
        figures |= {
            "pss_mib": round(pss_kib / 1024, 1),
            "kib_per_vm": round((pss_kib - idle_kib) / vms, 1),
            "equal_sets": vmis == on_bus and len(vmis) == vms,
        }
        yield name, figures
        yield f"{name}: deleted", deletes(platform)


def verdicts(figures: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The bounds of a run."""
    rate = figures["rate"]
    return {
        f"writes a VM <= {WRITES_MAX:g}": rate["writes_per_vm"] <= WRITES_MAX,
        f"apply to Running p50 <= {P50_MS_MAX:g} ms": rate["apply_to_running_ms"]["p50"]
        <= P50_MS_MAX,
        f"bridge <= {PSS_MIB_MAX:g} MiB": rate["pss_mib"] <= PSS_MIB_MAX,
        f"KiB more a VM <= {KIB_PER_VM_MAX:g}": rate["kib_per_vm"] <= KIB_PER_VM_MAX,
        "equal sets on both sides": all(f.get("equal_sets", True) for f in figures.values()),
    }


def table(figures: dict[str, dict[str, Any]], holds: dict[str, bool]) -> str:
    """Format as Markdown."""
    rows = []
    for name, found in figures.items():
        told = ", ".join(f"{key} {value}" for key, value in found.items())
        rows.append(f"| {name} | {told} |")
    rows += [f"| {name} | {'ok' if held else 'MISSED'} |" for name, held in holds.items()]
    return "\n".join(["| phase | |", "|---|---|", *rows])


@contextmanager
def world(nodes: int) -> Iterator[Platform]:
    """A control plane with KubeVirt's CRDs, and virtbus next to it."""
    folder = programs()
    assert folder is not None, "not built; run: make k8s-tools"
    with ControlPlane(folder) as control:
        control.kubectl("apply", "-f", str(CRDS))
        control.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS))
        control.kubectl("create", "namespace", NAMESPACE)
        with bridged(control, nodes) as platform:
            yield platform


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.load.kubernetes", description=__doc__)
    parser.add_argument("--vms", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="applied a second")
    parser.add_argument("--nodes", type=int, default=50)
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with world(options.nodes) as platform:
        for name, found in run(platform, options.vms, options.rate):
            figures[name] = found
            sys.stdout.write(line(name, **found) + "\n")
            sys.stdout.flush()
        for complaint in platform.bridge.complaints()[:20]:
            sys.stderr.write(f"bridge: {complaint}\n")
    holds = verdicts(figures)
    sys.stdout.write(table(figures, holds) + "\n")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
