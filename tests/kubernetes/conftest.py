"""One control plane for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes.cluster import Cluster, programs

CRDS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "crds"


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster that is ready. Tests use namespaces of their own and leave nothing in it."""
    folder = programs()
    assert folder is not None, "not built; run: make k8s-tools"
    with Cluster(folder) as running:
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nkubernetes: ready after {running.ready_s:.1f} s")
        yield running


@pytest.fixture(scope="session")
def kubevirt(cluster: Cluster) -> Cluster:
    """The cluster with KubeVirt's CRDs, which stay in it."""
    cluster.kubectl("apply", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS))
    return cluster
