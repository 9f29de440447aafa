"""Binds pods to the cluster's only node: the part of a scheduler that these tests need."""

import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kubernetes.cluster import Cluster, Json

LOOK_S = 0.5
UNBOUND = "/api/v1/pods?fieldSelector=spec.nodeName="


class Binder:
    """A thread that binds each pod whose selector the node's labels match."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster = cluster
        self._node = node
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Bind pods until the context ends."""
        thread = threading.Thread(target=self._run, name="binder")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self._bind_all()
            except (OSError, urllib.error.HTTPError):
                continue  # a pod was bound or removed meanwhile, or the server is busy

    def _bind_all(self) -> None:
        pods = self._cluster.send("GET", UNBOUND)["items"]
        waiting = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        if not waiting:
            return
        labels = self._cluster.send("GET", f"/api/v1/nodes/{self._node}")["metadata"]["labels"]
        for pod in waiting:
            if pod["spec"].get("nodeSelector", {}).items() <= labels.items():
                self._bind(pod["metadata"])

    def _bind(self, pod: Json) -> None:
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self._node},
        }
        path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}/binding"
        self._cluster.send("POST", path, binding)
