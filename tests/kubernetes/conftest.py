"""One control plane for all tests of this folder, and one node for those of VM pods."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.platform import Platform as Host
from tests.e2e.platform import until
from tests.kubernetes.binder import Binder
from tests.kubernetes.cluster import CRDS, Cluster, programs
from tests.kubernetes.container_host import NAME, ContainerHost
from tests.kubernetes.platform import Platform, bridged
from tests.kubernetes.pod_node import NODE_LABEL, PodNode
from tests.kubernetes.test_chart import helm
from tests.kubernetes.virtlet_manifests import HOSTPATH

HERE = Path(__file__).parent
collect_ignore = [] if "VIRTBUS_VPA" in os.environ else ["test_vm_pod_vpa.py"]
ENDS = ExitStack()
SHARED: list[Cluster] = []
"""The running cluster, at most one."""
READY_S = pytest.StashKey[float]()
"""Duration of the control plane's start, seconds."""


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster that is ready. Tests use namespaces of their own and leave nothing in it."""
    with ENDS:
        if not SHARED:  # a module outside this folder imports this fixture, as one of its own
            folder = programs()
            assert folder is not None, "not built; run: make k8s-tools"
            running = ENDS.enter_context(Cluster(folder))
            ENDS.callback(SHARED.clear)
            SHARED.append(running)
            request.config.stash[READY_S] = running.ready_s
        yield SHARED[0]


@pytest.hookimpl(trylast=True)  # what the test itself used is gone
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the control plane where no test follows that uses it: it takes CPU from all others."""
    if nextitem is None or not (
        nextitem.path.is_relative_to(HERE) or nextitem.get_closest_marker("kubernetes")
    ):
        ENDS.close()


@pytest.fixture(scope="session")
def kubevirt(cluster: Cluster) -> Cluster:
    """The cluster with KubeVirt's CRDs, which stay in it."""
    cluster.kubectl("apply", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS))
    return cluster


@pytest.fixture(scope="module")
def platform(kubevirt: Cluster) -> Iterator[Platform]:
    """The cluster with the bridge in it, virtbus next to it; its webhooks end with the module."""
    with bridged(kubevirt) as running:
        yield running


@pytest.fixture(scope="session")
def pod_node(cluster: Cluster) -> PodNode:
    """A Ready node with both runtimes, for the tests of VM pods; it ends with the control plane."""
    folder = programs()
    assert folder is not None, "not built; run: make k8s-tools"
    pair = cluster.authority.sign("node", f"system:node:{NAME}", groups=["system:nodes"])
    platform = Host()
    ENDS.callback(platform.wipe)
    allowed = json.loads(platform.environ["VIRTBUS_DIRECTORIES_ALLOWED"])
    platform.environ["VIRTBUS_DIRECTORIES_ALLOWED"] = json.dumps({**allowed, str(HOSTPATH): []})
    platform.start()
    login = cluster.kubeconfig_of("node", pair)
    authority = cluster.authority.certificate
    host = ContainerHost(platform, folder / "kubelet", folder / "debian", login, authority)
    ENDS.enter_context(host.running())
    node = PodNode(cluster, host)
    until(lambda: node.has(f"/api/v1/nodes/{NAME}"), "the node registers")
    until(node.ready, "the node is Ready")
    cluster.kubectl("apply", "-f", str(host.base / "runtimeclass.yaml"))
    cluster.kubectl("label", "node", NAME, NODE_LABEL, "--overwrite")
    ENDS.enter_context(Binder(cluster, NAME).running())
    return node


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print results that are otherwise hidden: pytest shows a fixture's output only on failure."""
    ready_s = terminalreporter.config.stash.get(READY_S, None)
    if ready_s is not None:
        terminalreporter.write_line(f"kubernetes: a control plane was ready after {ready_s:.1f} s")
    passed = (report.nodeid for report in terminalreporter.getreports("passed"))
    if helm() is None and any("test_chart" in name for name in passed):
        terminalreporter.write_line(
            "kubernetes: no helm (VIRTBUS_HELM): the chart is read by us only"
        )
