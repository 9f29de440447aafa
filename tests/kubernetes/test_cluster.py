"""The test cluster is real: it has each feature on which the bridge's tests rely."""

import base64
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.platform import until
from tests.kubernetes.cluster import Cluster, programs

pytestmark = pytest.mark.kubernetes

CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: greeting}
data: {text: hello}
"""


def test_a_manifest_is_applied_twice_without_a_change(cluster: Cluster) -> None:
    with cluster.namespace("apply") as ns:
        assert "created" in cluster.kubectl("apply", "-n", ns, "-f", "-", stdin=CONFIG_MAP)
        assert "unchanged" in cluster.kubectl("apply", "-n", ns, "-f", "-", stdin=CONFIG_MAP)
        assert cluster.get("-n", ns, "configmap", "greeting")["data"] == {"text": "hello"}


def test_client_and_server_are_of_one_version(cluster: Cluster) -> None:
    said = json.loads(cluster.kubectl("version", "-o", "json"))
    assert said["clientVersion"]["gitVersion"] == said["serverVersion"]["gitVersion"]
    assert said["serverVersion"]["minor"].isdigit()


def test_a_user_without_rights_is_refused_until_a_role_is_bound(cluster: Cluster) -> None:
    stranger = cluster.kubeconfig_of("stranger", cluster.authority.sign("stranger", "stranger"))
    with cluster.namespace("rights") as ns:
        asked = ("auth", "can-i", "list", "configmaps", "-n", ns)
        assert cluster.try_kubectl(*asked, kubeconfig=stranger).stdout.strip() == "no"
        cluster.kubectl(
            "create", "rolebinding", "view", "-n", ns, "--clusterrole=view", "--user=stranger"
        )
        until(lambda: cluster.try_kubectl(*asked, kubeconfig=stranger).returncode == 0, "the role")


def test_the_garbage_collector_deletes_dependents(cluster: Cluster) -> None:
    with cluster.namespace("owners") as ns:
        cluster.kubectl("apply", "-n", ns, "-f", "-", stdin=CONFIG_MAP)
        uid = cluster.get("-n", ns, "configmap", "greeting")["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "greeting", "uid": uid}
        owned = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "owned", "ownerReferences": [owner]},
        }
        cluster.kubectl("create", "-n", ns, "-f", "-", stdin=json.dumps(owned))
        cluster.kubectl("delete", "-n", ns, "configmap", "greeting")
        cluster.kubectl("wait", "-n", ns, "--for=delete", "configmap/owned", "--timeout=30s")


class _Heard(http.server.BaseHTTPRequestHandler):
    """An aggregated API that always answers with the user named by the front proxy's headers."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"user": self.headers["X-Remote-User"]}).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base's name
        """Log nothing: the test reports failures."""


@contextmanager
def aggregated(cluster: Cluster) -> Iterator[int]:
    """The port of an HTTPS server that only the front proxy may call."""
    pair = cluster.authority.sign("heard", "heard", hosts=["heard.default.svc"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pair)
    context.load_verify_locations(cluster.front_proxy.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Heard) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_front_proxy_names_the_user_to_an_aggregated_api(cluster: Cluster) -> None:
    ca = cluster.authority.certificate.read_bytes()
    with aggregated(cluster) as port:
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "heard", "namespace": "default"},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }
        api = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1.heard.test"},
            "spec": {
                "group": "heard.test",
                "version": "v1",
                "groupPriorityMinimum": 1000,
                "versionPriority": 15,
                "service": {"name": "heard", "namespace": "default", "port": port},
                "caBundle": base64.b64encode(ca).decode(),
            },
        }
        both = "\n---\n".join(json.dumps(each) for each in (service, api))
        cluster.kubectl("create", "-f", "-", stdin=both)
        try:
            path = ("get", "--raw", "/apis/heard.test/v1/who")
            until(lambda: cluster.try_kubectl(*path).returncode == 0, "the aggregated API")
            assert json.loads(cluster.kubectl(*path)) == {"user": "admin"}
        finally:
            cluster.kubectl("delete", "-f", "-", stdin=both)


def test_killed_programs_come_back_with_their_data_and_nothing_outlives_the_cluster() -> None:
    folder = programs()
    assert folder is not None
    with Cluster(folder) as own:
        own.kubectl("create", "-f", "-", stdin=CONFIG_MAP)
        for program in (own.etcd, own.apiserver):
            program.kill()
            program.start()
        own.wait_ready()
        assert own.get("configmap", "greeting")["data"] == {"text": "hello"}
        pids = [program.pid for program in (own.etcd, own.apiserver, own.controllers)]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert not own.base.exists()
