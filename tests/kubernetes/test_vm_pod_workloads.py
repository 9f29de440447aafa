"""Controllers of Kubernetes whose pods are VMs, and probes of guests."""

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.platform import until
from tests.e2e.test_vm_pod import block_device
from tests.kubernetes.container_host import NAME
from tests.kubernetes.pod_node import BOOT_S, Json, PodNode, guest, template

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1200),
]

SCRIPT = "VirtletCloudInitUserDataScript"
UP = {"tcpSocket": {"port": 22}, "periodSeconds": 2, "failureThreshold": 100}
"""A probe that succeeds once the guest has booted."""
MARK = "virtbus written by the first pod"


@pytest.fixture
def own(pod_node: PodNode, request: pytest.FixtureRequest) -> Iterator[PodNode]:
    """A namespace of the test's own."""
    name = request.node.name.replace("_", "-")[5:45].strip("-")
    with pod_node.apart(name) as own:
        yield own


def workload(kind: str, name: str, pod: Json, **spec: Any) -> Json:
    """Return a Deployment or a StatefulSet of a pod."""
    selector = {"matchLabels": pod["metadata"]["labels"]}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"selector": selector, "template": template(pod), **spec},
    }


def job(name: str, script: str, **spec: int) -> Json:
    """Return a Job whose guest runs a script after its boot."""
    notes = {SCRIPT: f"#!/bin/sh\n{script}\n", "VirtletDiskDriver": "virtio"}
    pod = guest(name, notes=notes, restartPolicy="Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template(pod), **spec},
    }


def test_a_deployment_is_updated_without_a_gap(own: PodNode) -> None:
    pod = guest("web", vm={"readinessProbe": UP})
    strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    own.apply(workload("Deployment", "web", pod, replicas=2, strategy=strategy))
    rollout = ("rollout", "status", "deployment/web", f"--timeout={2 * BOOT_S:g}s")
    own.kubectl(*rollout)
    before = {one["uid"] for one in own.vms()}
    assert len(before) == 2
    pod["spec"]["containers"][0]["env"] = [{"name": "VERSION", "value": "2"}]
    own.apply(workload("Deployment", "web", pod, replicas=2, strategy=strategy))
    with subprocess.Popen(own.words(*rollout), stdout=subprocess.DEVNULL) as rolling:
        while rolling.poll() is None:
            assert sum(ready for _, _, ready in own.pods().values()) >= 2
            time.sleep(1)
        assert rolling.returncode == 0
    until(lambda: len(own.vms()) == 2, "the former VMs are gone", within_s=120)
    assert not before & {one["uid"] for one in own.vms()}


def test_a_stateful_set_keeps_the_data_of_its_volume(own: PodNode) -> None:
    with block_device(own.platform.base) as device:
        matching = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NAME]}
        terms = [{"matchExpressions": [matching]}]
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "loop"},
            "spec": {
                "capacity": {"storage": "8Mi"},
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": "Block",
                "storageClassName": "",
                "local": {"path": device},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            },
        }
        claim = {
            "metadata": {"name": "data"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": "Block",
                "storageClassName": "",
                "resources": {"requests": {"storage": "8Mi"}},
            },
        }
        data = {"volumeDevices": [{"name": "data", "devicePath": "/dev/data"}]}
        pod = guest("db", vm={**data, "readinessProbe": UP})
        more = {"replicas": 1, "serviceName": "db", "volumeClaimTemplates": [claim]}
        own.apply(volume, workload("StatefulSet", "db", pod, **more))
        try:
            rollout = ("rollout", "status", "statefulset/db", f"--timeout={BOOT_S:g}s")
            own.kubectl(*rollout)
            _in_device(own, f"echo {MARK} | dd conv=notrunc of=")
            former = own.pod("db-0")["metadata"]["uid"]
            own.delete("db-0")
            until(lambda: own.pods().get("db-0", (former,))[0] != former, "the next pod")
            own.kubectl(*rollout)
            assert MARK in _in_device(own, "head -c 64 ")
        finally:
            own.kubectl("delete", "statefulset", "db", "--cascade=foreground")
            own.kubectl("delete", "pvc", "--all")
            own.cluster.kubectl("delete", "pv", "loop")


def _in_device(own: PodNode, command: str) -> str:
    """Run a command in the guest; the disk of 8 MiB is its last word."""
    find = "d=$(grep -l '^16384$' /sys/block/vd*/size) && d=/dev/$(basename ${d%/size})"
    return own.kubectl("exec", "db-0", "--", "sh", "-c", f"{find} && {command}$d && sync")


def test_a_job_ends_as_its_guest_ends(own: PodNode) -> None:
    own.apply(
        job("done", "echo at work >/dev/ttyS0; poweroff"),
        job("crash", "echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger", backoffLimit=0),
    )
    own.wait("condition=Complete", "job/done")
    own.wait("condition=Failed", "job/crash")
    ended = {
        one["metadata"]["labels"]["app"]: one["status"]["containerStatuses"][0]["state"]
        for one in own.cluster.get("-n", own.namespace, "pods")["items"]
    }
    assert ended["done"]["terminated"]["exitCode"] == 0
    assert ended["done"]["terminated"]["reason"] == "Completed"
    assert ended["crash"]["terminated"]["reason"] == "GuestPanicked"
    assert ended["crash"]["terminated"]["exitCode"] == 1
    assert "at work" in own.kubectl("logs", "job/done")
    until(lambda: not addresses(own), "kubelet has stopped the sandboxes of pods that have ended")


def addresses(own: PodNode) -> list[str]:
    """Return the addresses of the namespace's VMs."""
    return [one for vm in own.vms() for nic in vm.get("interfaces", ()) for one in nic["addresses"]]


def test_a_liveness_probe_that_fails_restarts_the_guest(own: PodNode) -> None:
    alive = {"exec": {"command": ["test", "!", "-e", "/tmp/broken"]}, "timeoutSeconds": 10}
    served = {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 2, "timeoutSeconds": 5}
    vm = {
        # kubelet records 25 events of a pod, then one in five minutes: a slow boot must leave some.
        "startupProbe": {**UP, "periodSeconds": 15},
        "livenessProbe": {**alive, "periodSeconds": 2, "failureThreshold": 2},
        "readinessProbe": served,
    }
    own.apply(guest("probed", terminationGracePeriodSeconds=10, vm=vm))
    until(lambda: own.container("probed").get("started"), "the guest has started", within_s=BOOT_S)
    (first,) = own.vms()
    own.kubectl("exec", "probed", "--", "sh", "-c", "touch /root/kept")
    assert not own.container("probed")["ready"]
    own.kubectl("exec", "probed", "--", "httpd", "-p", "8080", "-h", "/run")
    own.kubectl("exec", "probed", "--", "sh", "-c", "echo served >/run/index.html")
    own.wait("condition=Ready", "pod/probed")
    own.kubectl("exec", "probed", "--", "touch", "/tmp/broken")

    def restarted() -> bool:
        status = own.container("probed")
        return bool(status["restartCount"] == 1 and status.get("started"))

    until(restarted, "the guest was restarted", within_s=BOOT_S)
    assert "Liveness probe failed" in own.events("probed")
    assert own.container("probed")["lastState"]["terminated"]["reason"] in {"Completed", "Error"}
    assert "GUEST-READY" in own.kubectl("logs", "--previous", "probed")
    assert own.kubectl("exec", "probed", "--", "ls", "/root/kept") == "/root/kept\n"
    assert [one["uid"] for one in own.vms()] == [first["uid"]]


def test_a_guest_that_ignores_its_power_button_ends_with_its_grace(own: PodNode) -> None:
    own.apply(guest("deaf", terminationGracePeriodSeconds=8))
    own.wait("condition=Ready", "pod/deaf")
    own.booted("deaf")
    own.kubectl("exec", "deaf", "--", "killall", "acpid")
    assert 7 < own.delete("deaf") < 30
