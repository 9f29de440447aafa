"""An aggregated API of a test cluster: a port of this machine, registered with the API server."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.e2e.platform import until
from tests.kubernetes.cluster import Cluster

GROUP = "subresources.kubevirt.io"
SERVICE = "virtbus-kubebridge"
NAMESPACE = "default"
HOST = f"{SERVICE}.{NAMESPACE}.svc"
"""The host name that the API server expects."""


@contextmanager
def registered(
    cluster: Cluster, port: int, *versions: str, group: str = GROUP, service: str = SERVICE
) -> Iterator[None]:
    """Wait until the API server has discovered the port's resources."""
    ca = base64.b64encode(cluster.authority.certificate.read_bytes()).decode()
    target = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service, "namespace": NAMESPACE},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    apis = [
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{version}.{group}"},
            "spec": {
                "group": group,
                "version": version,
                "groupPriorityMinimum": 1000,
                "versionPriority": 15 - place,
                "service": {"name": service, "namespace": NAMESPACE, "port": port},
                "caBundle": ca,
            },
        }
        for place, version in enumerate(versions)
    ]
    all_of_it = "\n---\n".join(json.dumps(each) for each in (target, *apis))
    cluster.kubectl("apply", "-f", "-", stdin=all_of_it)
    try:
        for version in versions:
            until(partial(_answers, cluster, f"/apis/{group}/{version}"), version)
        yield
    finally:
        cluster.kubectl("delete", "-f", "-", stdin=all_of_it)


def _answers(cluster: Cluster, path: str) -> bool:
    return cluster.try_kubectl("get", "--raw", path).returncode == 0
