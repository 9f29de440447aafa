"""In-place resizes of VM pods by a real kubelet: the limits of the running guest follow."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest
from tests.e2e import host
from tests.e2e.platform import until
from tests.kubernetes.container_host import CGROUPS
from tests.kubernetes.pod_node import BOOT_S, Json, PodNode, guest

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]

MIB = 1024**2
SIZES = {
    "requests": {"cpu": "100m", "memory": "1Gi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
"""kubelet lowers no limit below what a container uses; without KVM an emulator has its own part."""
RESIZE_S = 300.0
LOOK_S = 5.0
"""The time over which the autoscaler measures a guest."""
SPARE = 1.25
"""The autoscaler gives a guest that much more memory than it uses."""
SPENT, MEMORY = "container_cpu_usage_seconds_total", "container_memory_working_set_bytes"
BUSY = "setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $! >/run/busy"


@pytest.fixture(scope="module")
def own(pod_node: PodNode) -> Iterator[PodNode]:
    """A namespace on a node that resizes pods in place."""
    with pod_node.resizable(), pod_node.apart("resize") as own:
        yield own


@pytest.fixture
def pod(own: PodNode, request: pytest.FixtureRequest) -> Iterator[str]:
    """A running VM pod; its name is the test's."""
    name = request.node.name.replace("_", "-")[5:35].strip("-")
    own.apply(guest(name, vm={"resources": SIZES}))
    own.wait("condition=Ready", f"pod/{name}")
    own.booted(name)
    yield name
    own.delete(name)


def test_a_resize_limits_the_running_guest(own: PodNode, pod: str) -> None:
    before, limits = own.pods()[pod], Limits(own, pod)
    full = _memory_bytes(own, pod)
    first = limits.now()
    own.kubectl("exec", pod, "--", "sh", "-c", BUSY)
    _patch(own, pod, requests={"cpu": "150m"}, limits={"cpu": "200m"})
    _reached(own, pod)
    slow = limits.now()
    assert slow["quota"] / slow["period"] == pytest.approx(0.2)
    assert slow["shares"] > first["shares"]
    counted = limits.periods()
    assert 0.1 < _used(own, pod)[0] < 0.25, "the busy guest has its quota, and no more"
    assert limits.periods() > counted, "the kernel counts periods of the quota"

    _patch(own, pod, requests={"memory": "768Mi"}, limits={"cpu": "1", "memory": "768Mi"})
    _reached(own, pod)
    assert limits.now()["quota"] / limits.now()["period"] == pytest.approx(1)
    assert limits.memory_bytes() == pytest.approx(768 * MIB, rel=0.01)
    assert full - _memory_bytes(own, pod) == pytest.approx(256 * MIB, rel=0.1)

    _patch(own, pod, requests={"memory": "1Gi"}, limits={"memory": "1Gi"})
    _reached(own, pod)
    until(lambda: _memory_bytes(own, pod) == full, "the guest has all of its memory again")
    assert own.pods()[pod] == before
    assert limits.same_emulator()


def test_an_autoscaler_resizes_a_guest_by_what_it_uses(own: PodNode, pod: str) -> None:
    """It reads kubelet's measurements, and patches as the updater of a VPA does in place."""
    before, limits = own.pods()[pod], Limits(own, pod)
    asked, given = [], []
    for busy in (False, True):
        if busy:
            own.kubectl("exec", pod, "--", "sh", "-c", BUSY)
        cpus, memory_bytes = _used(own, pod)
        cpu_m, memory_mib = max(10, int(cpus * 1000)), int(memory_bytes * SPARE / MIB)
        _recommend(own, pod, f"{cpu_m}m", f"{memory_mib}Mi")
        _reached(own, pod)
        assert limits.memory_bytes() == pytest.approx(memory_mib * MIB, rel=0.02)
        asked.append(cpu_m)
        given.append(limits.now()["shares"])
    assert asked[0] < asked[1], asked
    assert given[0] < given[1], given
    assert own.pods()[pod] == before
    assert limits.same_emulator()


def test_a_resize_that_a_guest_cannot_have_says_why_and_may_be_taken_back(
    own: PodNode, pod: str
) -> None:
    before, limits = own.pods()[pod], Limits(own, pod)
    _patch(own, pod, requests={"memory": "2Gi"}, limits={"memory": "2Gi"})
    until(
        lambda: "virtbus.io/memory-max" in _condition(own, pod, "PodResizeInProgress"),
        lambda: f"the next step is told: {own.pod(pod)['status']}",
        within_s=RESIZE_S,
    )
    _patch(own, pod, requests={"memory": "1Gi"}, limits={"memory": "1Gi"})
    _reached(own, pod)
    assert own.pods()[pod] == before
    assert limits.same_emulator()


def test_a_policy_lets_the_next_attempt_have_more_vcpus(own: PodNode) -> None:
    policy = [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]
    own.apply(guest("restarts", vm={"resources": SIZES, "resizePolicy": policy}))
    own.wait("condition=Ready", "pod/restarts")
    own.booted("restarts")
    (vm,) = _vms(own, "restarts")
    _patch(own, "restarts", limits={"cpu": "2"})
    until(
        lambda: (
            own.container("restarts").get("restartCount") == 1
            and own.container("restarts")["ready"]
        ),
        lambda: f"the next attempt: {own.container('restarts')} {own.events('restarts')}",
        within_s=BOOT_S,
    )
    own.booted("restarts")
    assert own.kubectl("exec", "restarts", "--", "nproc") == "2\n"
    assert [one["uid"] for one in _vms(own, "restarts")] == [vm["uid"]]
    _reached(own, "restarts")
    own.delete("restarts")


class Limits:
    """The limits of a pod's VM on its host, as libvirt and the kernel have them."""

    def __init__(self, own: PodNode, pod: str) -> None:
        (vm,) = _vms(own, pod)
        self._uid = vm["uid"]
        self._pids = host.qemu_pids(self._uid)
        self._domain = libvirt.open("qemu:///system").lookupByUUIDString(self._uid)

    def now(self) -> dict[str, int]:
        """Return the shares, the quota and the period of the VM's cgroup."""
        found = self._domain.schedulerParametersFlags(libvirt.VIR_DOMAIN_AFFECT_LIVE)
        names = {"shares": "cpu_shares", "quota": "global_quota", "period": "global_period"}
        return {name: found[key] for name, key in names.items()}

    def memory_bytes(self) -> int:
        """Return the memory that the balloon leaves to the guest."""
        return int(self._domain.info()[2]) * 1024

    def periods(self) -> int:
        """Return the number of periods in which the kernel enforced the VM's quota."""
        lines = (self._cgroup() / "cpu.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["nr_periods"])

    def same_emulator(self) -> bool:
        """Return True if no other emulator runs the VM."""
        return host.qemu_pids(self._uid) == self._pids

    def _cgroup(self) -> Path:
        """Return the VM's folder of the CPU controller; threads are in folders below it."""
        lines = Path(f"/proc/{self._pids[0]}/cgroup").read_text().splitlines()
        paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
        name = next((one for one in paths if "cpu" in one.split(",")), "")
        folder = CGROUPS / name / paths[name].lstrip("/")
        assert self._uid in str(folder), lines
        around = (folder, *folder.parents)
        return next(one for one in around if self._uid not in str(one.parent))


def _vms(own: PodNode, pod: str) -> list[Json]:
    return [one for one in own.vms() if one["labels"]["io.kubernetes.pod.name"] == pod]


def _memory_bytes(own: PodNode, pod: str) -> int:
    """Return the memory that the guest itself sees."""
    return int(own.kubectl("exec", pod, "--", "head", "-1", "/proc/meminfo").split()[1]) * 1024


def _patch(own: PodNode, pod: str, **resources: Any) -> None:
    """Resize a pod as a user does."""
    spec = {"spec": {"containers": [{"name": "vm", "resources": resources}]}}
    own.kubectl("patch", "pod", pod, "--subresource=resize", f"--patch={json.dumps(spec)}")


def _recommend(own: PodNode, pod: str, cpu: str, memory: str) -> None:
    """Resize a pod as an autoscaler does: memory as request and limit, and the request of CPU."""
    at = "/spec/containers/0/resources"
    values = {
        f"{at}/requests/cpu": cpu,
        f"{at}/requests/memory": memory,
        f"{at}/limits/memory": memory,
    }
    steps = [{"op": "add", "path": path, "value": value} for path, value in values.items()]
    patch = f"--patch={json.dumps(steps)}"
    own.kubectl("patch", "pod", pod, "--subresource=resize", "--type=json", patch)


def _condition(own: PodNode, pod: str, kind: str) -> str:
    """Return the message of a pod's condition; empty without it."""
    conditions = own.pod(pod)["status"].get("conditions", [])
    return next((str(one.get("message", "")) for one in conditions if one["type"] == kind), "")


def _reached(own: PodNode, pod: str) -> None:
    """Wait until kubelet reports that the wanted resources are in force."""

    def reached() -> bool:
        found = own.pod(pod)
        kinds = {one["type"] for one in found["status"]["conditions"]}
        (wanted,) = (one["resources"] for one in found["spec"]["containers"])
        (status,) = found["status"]["containerStatuses"]
        waits = kinds & {"PodResizePending", "PodResizeInProgress"}
        observed = found["status"].get("observedGeneration", 0)
        return (
            not waits
            and observed >= found["metadata"]["generation"]
            and status.get("resources") == wanted
        )

    until(
        reached,
        lambda: f"{own.pod(pod)['status']} {own.events(pod)}",
        within_s=RESIZE_S,
    )


def _used(own: PodNode, pod: str) -> tuple[float, float]:
    """Return the CPUs that a pod uses, over some seconds, and its memory, by kubelet's figures."""

    def later() -> tuple[float, float] | None:
        now = _measured(own, pod, SPENT)
        return now if now is not None and now[1] > first[1] else None

    first = until(lambda: _measured(own, pod, SPENT), f"{pod} is measured")
    time.sleep(LOOK_S)
    last = until(later, f"{pod} is measured again")
    memory = until(lambda: _measured(own, pod, MEMORY), "its memory is measured")
    return (last[0] - first[0]) / ((last[1] - first[1]) / 1000), memory[0]


def _measured(own: PodNode, pod: str, metric: str) -> tuple[float, float] | None:
    """Return a figure of kubelet's and its time in milliseconds, if there is one."""
    labels = f'namespace="{own.namespace}",pod="{pod}"'
    for line in own.measurements().splitlines():
        if line.startswith(f"{metric}{{") and labels in line:
            value, stamp = line.rpartition("} ")[2].split()
            return float(value), float(stamp)
    return None
