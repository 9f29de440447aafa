"""An API server refuses pods that cannot be VMs, by the policy of `virtbus cri install`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.platform import until
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.pod_node import box, guest

from virtbus.cli.cri.host_files import CONTAINERD, HostFiles

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

TARGET = {"kubernetes.io/target-runtime": "virtlet.cloud"}
SIDECAR = {"name": "side", "image": "busybox"}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def applied(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster with what the command wrote, in force."""
    files = HostFiles(Path(tmp_path_factory.mktemp("node")))
    files.write(CONTAINERD)
    cluster.kubectl("apply", "-f", str(files.runtime_class))
    until(lambda: refusal(cluster, crowd()), "the policy is in force")
    yield cluster
    cluster.kubectl("delete", "-f", str(files.runtime_class))


def crowd(**metadata: Json) -> Json:
    pod = guest("crowd")
    pod["spec"]["containers"].append(SIDECAR)
    pod["metadata"] |= metadata
    return pod


def refusal(cluster: Cluster, pod: Json) -> str:
    """Return the API server's refusal of a new pod; empty if it is accepted."""
    argv = ("create", "--dry-run=server", "-o", "name", "-f", "-")
    return cluster.try_kubectl(*argv, stdin=json.dumps(pod)).stderr


def test_a_vm_pod_with_a_second_container_is_refused_before_anything_starts(
    applied: Cluster,
) -> None:
    assert "has one container; remove the others" in refusal(applied, crowd())
    of_virtlet = crowd(annotations=TARGET)
    del of_virtlet["spec"]["runtimeClassName"]
    assert "has one container" in refusal(applied, of_virtlet)
    early = refusal(applied, guest("early", initContainers=[SIDECAR]))
    assert "no init containers or sidecars" in early
    assert not refusal(applied, guest("alone"))


def test_a_pod_of_containers_may_have_several(applied: Cluster) -> None:
    pod = box("two")
    pod["spec"]["containers"].append(SIDECAR)
    pod["spec"]["initContainers"] = [{"name": "early", "image": "busybox"}]
    assert not refusal(applied, pod)


def test_a_vm_pod_takes_no_debug_container(applied: Cluster) -> None:
    applied.kubectl("create", "-f", "-", stdin=json.dumps(guest("debugged")))
    try:
        argv = ("debug", "debugged", "--image=busybox", "--profile=general")
        assert "takes no debug container" in applied.try_kubectl(*argv).stderr
    finally:
        applied.kubectl("delete", "pod", "debugged", "--force", "--grace-period=0")


def test_the_emulator_of_a_vm_pod_counts_for_its_node(applied: Cluster) -> None:
    argv = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    made = json.loads(applied.kubectl(*argv, stdin=json.dumps(guest("alone"))))
    assert made["spec"]["overhead"] == {"memory": "48Mi"}
