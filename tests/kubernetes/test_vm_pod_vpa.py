"""A real VerticalPodAutoscaler resizes the guest of a VM pod in place, by kubelet's measurements.

VIRTBUS_VPA names a folder with the programs `recommender`, `updater` and `metrics-server` and the
file `vpa-v1-crd-gen.yaml`, which are built elsewhere (ADR 0024). Without it, this module is not
collected.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.platform import until
from tests.kubernetes.aggregated import NAMESPACE, registered
from tests.kubernetes.cluster import Program
from tests.kubernetes.pod_node import Json, PodNode, guest, template
from tests.kubernetes.test_vm_pod_resize import BUSY, Limits

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]

FOLDER = Path(os.environ["VIRTBUS_VPA"])
PORT = 10350
SIZES = {
    "requests": {"cpu": "250m", "memory": "1Gi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
"""A VPA keeps the ratio of limit and request, so its most CPU leaves the guest its one vCPU."""
ALLOWED = {
    "containerName": "*",
    "minAllowed": {"cpu": "50m", "memory": "256Mi"},
    "maxAllowed": {"cpu": "250m", "memory": "1Gi"},
}
DECIDES_S = 600.0
UNITS = {"": 1.0, "m": 0.001, "k": 1e3, "M": 1e6, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}


@pytest.fixture
def own(pod_node: PodNode) -> Iterator[PodNode]:
    """A namespace on a node that resizes pods in place, in a cluster with a VPA."""
    cluster = pod_node.cluster
    login = f"--kubeconfig={cluster.kubeconfig}"
    name = f"metrics-server.{NAMESPACE}.svc"
    pair = cluster.authority.sign("metrics", name, hosts=[name])
    programs = {
        "metrics-server": (
            f"--authentication-kubeconfig={cluster.kubeconfig}",
            f"--authorization-kubeconfig={cluster.kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={PORT}",
            f"--tls-cert-file={pair.certificate}",
            f"--tls-private-key-file={pair.key}",
            "--kubelet-insecure-tls",
            "--kubelet-preferred-address-types=Hostname",
            "--metric-resolution=10s",
            "--kubelet-request-timeout=9s",
        ),
        "recommender": (  # a guest's CPU of minutes ago counts for little
            "--address=127.0.0.1:0",
            "--recommender-interval=5s",
            "--cpu-histogram-decay-half-life=20s",
            "--v=3",
        ),
        "updater": (  # the webhook for new pods is not under test
            "--address=127.0.0.1:0",
            "--updater-interval=5s",
            "--min-replicas=1",
            "--in-recommendation-bounds-eviction-lifetime-threshold=1s",
            "--use-admission-controller-status=false",
            "--v=3",
        ),
    }
    kinds = ("-f", str(FOLDER / "vpa-v1-crd-gen.yaml"))
    cluster.kubectl("apply", *kinds)
    with ExitStack() as stack:
        stack.callback(cluster.kubectl, "delete", *kinds)
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *kinds)
        for program, words in programs.items():
            argv = [str((FOLDER / program).resolve()), login, *words]
            running = Program(argv, cluster.base / f"{program}.log")
            running.start()
            stack.callback(running.stop)
        group = "metrics.k8s.io"
        stack.enter_context(
            registered(cluster, PORT, "v1beta1", group=group, service="metrics-server")
        )
        stack.enter_context(pod_node.resizable())
        yield stack.enter_context(pod_node.apart("vpa"))


def test_a_vpa_resizes_a_guest_by_what_it_uses(own: PodNode) -> None:
    pod = guest("sized", vm={"resources": SIZES})
    own.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "sized"},
            "spec": {
                "selector": {"matchLabels": pod["metadata"]["labels"]},
                "template": template(pod),
            },
        }
    )
    own.kubectl("rollout", "status", "deployment/sized", "--timeout=240s")
    (name,) = own.pods()
    own.booted(name)
    before, limits = own.pods(), Limits(own, name)
    own.apply(
        {
            "apiVersion": "autoscaling.k8s.io/v1",
            "kind": "VerticalPodAutoscaler",
            "metadata": {"name": "sized"},
            "spec": {
                "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "sized"},
                "updatePolicy": {"updateMode": "InPlaceOrRecreate", "minReplicas": 1},
                "resourcePolicy": {"containerPolicies": [ALLOWED]},
            },
        }
    )

    def in_force(*, busy: bool) -> bool:
        (wanted,) = (one["resources"] for one in own.pod(name)["spec"]["containers"])
        limit, now = wanted["limits"], limits.now()
        return (
            (_number(wanted["requests"]["cpu"]) == 0.25) == busy
            and _number(limit["memory"]) < 2**30
            and own.container(name).get("resources") == wanted
            and now["quota"] / now["period"] == pytest.approx(_number(limit["cpu"]), rel=0.01)
            and limits.memory_bytes() == pytest.approx(_number(limit["memory"]), rel=0.02)
        )

    told = partial(_told, own, name, limits)
    until(partial(in_force, busy=False), told, within_s=DECIDES_S)
    own.kubectl("exec", name, "--", "sh", "-c", BUSY)
    until(partial(in_force, busy=True), told, within_s=DECIDES_S)
    assert own.pods() == before, "no pod was replaced or restarted"
    assert limits.same_emulator()
    assert "InPlaceResizedByVPA" in own.events(name)
    assert "sized" in own.kubectl("top", "pods")


def _number(quantity: str) -> float:
    """Return a quantity of Kubernetes as a number."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert found, quantity
    return float(found[1]) * UNITS[found[2]]


def _told(own: PodNode, name: str, limits: Limits) -> str:
    """Return what explains a resize that did not come."""
    pod: Json = own.pod(name)
    vpa = own.cluster.get("-n", own.namespace, "verticalpodautoscaler", "sized")
    base = own.cluster.base
    logs = {one: (base / f"{one}.log").read_text()[-3000:] for one in ("recommender", "updater")}
    told = {"spec": pod["spec"]["containers"], "status": pod["status"], "vpa": vpa.get("status")}
    return f"{json.dumps(told)} {limits.now()} {limits.memory_bytes()} {own.events(name)} {logs}"
