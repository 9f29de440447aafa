"""A Ready node whose pods are VMs and containers, and a namespace of pods on it."""

import json
import os
import pty
import select
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from tests.e2e.platform import until
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.container_host import BOX, NAME, ContainerHost

BOOT_S = 240.0
"""Time of a boot on a busy machine without KVM."""
KUBELET = "https://127.0.0.1:10250"
NODE_LABEL = "virtbus.io/vm-pods=true"
CTRL_BRACKET = b"\x1d"

Json = dict[str, Any]


def guest(name: str, *, notes: Mapping[str, str] | None = None, **spec: Any) -> Json:
    """Return a pod that is the VM `tiny`. `spec` adds to the pod's spec, `vm` to its container."""
    vm = {
        "name": "vm",
        "image": "virtlet.cloud/tiny",
        "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": {"memory": "128Mi"}},
        **spec.pop("vm", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}, "annotations": dict(notes or {})},
        "spec": {
            "runtimeClassName": "virtbus",
            "terminationGracePeriodSeconds": 30,
            "containers": [vm],
            **spec,
        },
    }


def box(name: str, command: str = "while true; do echo box; sleep 1; done") -> Json:
    """Return a pod that is a container and runs a shell's command."""
    main = {"name": "main", "image": BOX, "imagePullPolicy": "IfNotPresent", "args": [command]}
    spec = {"hostNetwork": True, "terminationGracePeriodSeconds": 2, "containers": [main]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def template(pod: Json) -> Json:
    """Return a pod as the template of a workload."""
    return {"metadata": pod["metadata"], "spec": pod["spec"]}


class PodNode:
    """The node, seen from one namespace of the cluster. All methods block."""

    def __init__(self, cluster: Cluster, host: ContainerHost, namespace: str = "default") -> None:
        self.cluster = cluster
        self.host = host
        self.platform = host.platform
        self.namespace = namespace

    @contextmanager
    def apart(self, namespace: str) -> Iterator["PodNode"]:
        """Yield the node for a namespace of a test's own; at its end all its VMs are gone."""
        own = PodNode(self.cluster, self.host, namespace)
        with self.cluster.namespace(namespace):
            account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
            until(lambda: own.has(account), "the namespace has its account")
            yield own
        until(lambda: not own.vms(), "the VMs are gone with their pods", within_s=180)

    # --- kubectl --------------------------------------------------------------------------
    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        """Return the output of `kubectl -n NAMESPACE ARGV…`."""
        return self.cluster.kubectl("-n", self.namespace, *argv, stdin=stdin)

    def words(self, *argv: str) -> list[str]:
        """Return the command line of kubectl in this namespace."""
        config = f"--kubeconfig={self.cluster.kubeconfig}"
        return [str(self.cluster.program), config, "-n", self.namespace, *argv]

    def apply(self, *objects: Json) -> None:
        """Apply objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def has(self, path: str) -> bool:
        """Return True if the API server has an object."""
        return self.cluster.try_kubectl("get", "--raw", path).returncode == 0

    def pod(self, name: str) -> Json:
        """Return a pod."""
        return self.cluster.get("-n", self.namespace, "pod", name)

    def container(self, name: str) -> Json:
        """Return the status of a pod's container; empty before there is one."""
        found = self.pod(name)["status"].get("containerStatuses") or [{}]
        status: Json = found[0]
        return status

    def wait(self, condition: str, *names: str, within_s: float = BOOT_S) -> None:
        """Wait for a condition of objects, such as `pod/guest`."""
        self.kubectl("wait", f"--for={condition}", *names, f"--timeout={within_s:g}s")

    def delete(self, *names: str, within_s: float = 120) -> float:
        """Delete pods, wait until they are gone, and return the seconds that it took."""
        began = time.monotonic()
        self.kubectl("delete", "pod", *names, f"--timeout={within_s:g}s")
        return time.monotonic() - began

    def events(self, name: str) -> str:
        """Return the reasons and texts of an object's events."""
        columns = "custom-columns=R:.reason,M:.message"
        chosen = f"--field-selector=involvedObject.name={name}"
        return self.kubectl("get", "events", chosen, "-o", columns)

    # --- guests ---------------------------------------------------------------------------
    def vms(self) -> list[Json]:
        """Return the VMs of the namespace's pods."""
        named = "io.kubernetes.pod.namespace"
        return [one for one in self.platform.vms() if one["labels"].get(named) == self.namespace]

    def booted(self, *pods: str) -> None:
        """Wait until the guests of pods have reported that they are ready."""
        for pod in pods:
            self.logged(pod, b"GUEST-READY")

    def logged(self, pod: str, text: bytes, within_s: float = BOOT_S) -> None:
        """Follow a pod's log until a whole line of it has a text; kubectl shows no part of a line.

        One kubectl that follows takes less CPU than many that read.
        """
        deadline, seen = time.monotonic() + within_s, b""
        argv = self.words("logs", "-f", pod)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as following:
            try:
                assert following.stdout is not None
                source = following.stdout.fileno()
                while text not in seen:
                    left_s = deadline - time.monotonic()
                    assert left_s > 0, f"{pod}'s log has no {text!r} but {seen[-3000:]!r}"
                    if select.select([source], [], [], left_s)[0]:
                        data = os.read(source, 65_536)
                        assert data, f"{pod}'s log ended without {text!r}: {seen[-3000:]!r}"
                        seen += data
            finally:
                following.kill()

    @contextmanager
    def terminal(self, *argv: str) -> Iterator["Terminal"]:
        """Run kubectl with a terminal of its own."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            self.words(*argv), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        try:
            yield Terminal(ours, process)
        finally:
            process.kill()
            process.wait(10)
            os.close(ours)

    @contextmanager
    def resizable(self) -> Iterator[None]:
        """Let kubelet resize pods in place; it is restarted for that, and at the end."""
        with self.host.pod_cgroups():
            self.restart_kubelet()
            yield
        self.restart_kubelet()

    def measurements(self) -> str:
        """Return kubelet's `/metrics/resource`."""
        return self._of_kubelet("metrics/resource")

    def summary(self, name: str) -> Json:
        """Return a pod in kubelet's `/stats/summary`; empty if it is not there."""
        told = json.loads(self._of_kubelet("stats/summary"))
        here = {"name": name, "namespace": self.namespace}
        return next((one for one in told["pods"] if here.items() <= one["podRef"].items()), {})

    def _of_kubelet(self, path: str) -> str:
        """Return an answer of kubelet; the API server forwards to no loopback address."""
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # it signs for itself
        tls.load_cert_chain(*self.cluster.admin)
        with urllib.request.urlopen(f"{KUBELET}/{path}", timeout=30, context=tls) as answer:
            text: bytes = answer.read()
        return text.decode()

    def restart_kubelet(self) -> None:
        """Kill kubelet, start it again, and wait until it answers and the Node is Ready."""
        self.host.kubelet.kill()
        self.host.kubelet.start()

        def answers() -> bool:
            with suppress(OSError):
                return bool(self.measurements())
            return False

        until(answers, "kubelet answers")
        until(self.ready, "the Node is Ready with its next kubelet")

    def ready(self) -> bool:
        """Return True if the Node is Ready."""
        conditions = self.cluster.get("node", NAME)["status"].get("conditions", [])
        return {"Ready": "True"}.items() <= {
            one["type"]: one["status"] for one in conditions
        }.items()

    def pods(self) -> dict[str, tuple[str, int, bool]]:
        """Return the uid, the restarts and the readiness of each pod by its name."""
        items = self.cluster.get("-n", self.namespace, "pods")["items"]
        return {one["metadata"]["name"]: _told(one) for one in items}


def _told(pod: Json) -> tuple[str, int, bool]:
    (status,) = pod["status"].get("containerStatuses") or [{}]
    return pod["metadata"]["uid"], status.get("restartCount", 0), status.get("ready", False)


class Terminal:
    """The user's side of a program's terminal."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor = descriptor
        self._process = process
        self.seen = b""

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._descriptor, keys)

    def until(self, text: bytes, within_s: float = 60) -> None:
        """Read until the program has shown a text; it counts from the last call on."""
        deadline = time.monotonic() + within_s
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self._descriptor], [], [], 0.5)[0]:
                self.seen += os.read(self._descriptor, 4096)
        self.seen = self.seen.partition(text)[2]

    def ended(self, within_s: float = 30) -> int:
        """Read until the program's end, and return its exit code.

        A program that restores its terminal waits until its output was read.
        """
        deadline = time.monotonic() + within_s
        while (code := self._process.poll()) is None:
            assert time.monotonic() < deadline, f"it runs on after {self.seen!r}"
            if select.select([self._descriptor], [], [], 0.5)[0]:
                with suppress(OSError):  # EIO: nobody has the other side any more
                    self.seen += os.read(self._descriptor, 4096)
        return code
