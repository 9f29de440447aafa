"""A real Kubernetes control plane on loopback: etcd, API server, controller manager; no nodes.

It has a certificate authority of its own, TLS, RBAC and aggregation (a front proxy's own CA). It
is ready within seconds and leaves nothing behind. Its programs are ended by their pid, and the
kernel ends them if the tests' process is killed.
"""

import json
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.kubernetes.certificates import Authority, Pair, key_pair

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "tools" / "k8s" / "build"
CRDS = ROOT / "deploy" / "kubernetes" / "crds"
READY_S = 200.0
"""It takes four seconds; with fifteen others for each CPU, more than a minute."""
STOP_S = 20.0
_SERVICES = "10.96.0.0/24"

Json = dict[str, Any]


def programs() -> Path | None:
    """Return the folder of etcd, kube-apiserver, kube-controller-manager and kubectl, if built."""
    found = subprocess.run([BUILD, "--where"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


class Program:
    """One program of the cluster; `start` after `kill` or `stop` runs it again, on its old data."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self._argv = argv
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The pid of the running program."""
        assert self._process is not None, f"{self._argv[0]} does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it; it is not ready yet on return."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Return True if it ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """End it as `kill -9` does; it is gone on return."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and kill it after STOP_S."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        self._process = None


class Cluster:
    """One control plane. All methods block.

    `kubeconfig` and `admin` are of a member of system:masters. `authority` signs users and servers,
    `front_proxy` only the API server's own certificate towards aggregated APIs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.base = Path(tempfile.mkdtemp(prefix="virtbus-k8s-"))
        self.authority = Authority(self.base, "ca")
        self.front_proxy = Authority(self.base, "front-proxy-ca")
        # Bound, but never listened on: nobody else gets the port while the API server is down.
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._port.getsockname()[1]}"
        self.admin = self.authority.sign("admin", "admin", groups=["system:masters"])
        self.kubeconfig = self.kubeconfig_of("admin", self.admin)
        self._tls = ssl.create_default_context(cafile=str(self.authority.certificate))
        self._tls.load_cert_chain(*self.admin)
        self._tokens = key_pair(self.base / "accounts")
        self.etcd = Program(self._etcd(), self.base / "etcd.log")
        self.apiserver = Program(self._apiserver(), self.base / "apiserver.log")
        self.controllers = Program(self._controllers(), self.base / "controllers.log")
        self.ready_s = 0.0
        """The duration of the start, seconds."""

    # --- lifecycle ------------------------------------------------------------------------
    def __enter__(self) -> Self:
        began = time.monotonic()
        try:
            self.etcd.start()
            self.apiserver.start()
            self._wait("/readyz")  # the controllers end if that takes more than ten seconds
            self.controllers.start()
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        self.ready_s = time.monotonic() - began
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the programs and remove their files."""
        for program in (self.controllers, self.apiserver, self.etcd):
            program.kill()  # none of their data is kept
        self._port.close()
        shutil.rmtree(self.base)

    def wait_ready(self) -> None:
        """Wait until the API server is ready and namespaces get their service accounts."""
        self._wait("/readyz", "/api/v1/namespaces/default/serviceaccounts/default")

    def _wait(self, *paths: str) -> None:
        deadline = time.monotonic() + READY_S
        while not all(self._status(path) == 200 for path in paths):
            ended = [p.log for p in (self.etcd, self.apiserver, self.controllers) if p.ended()]
            assert not ended, f"{ended[0].name}: {ended[0].read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < deadline, self.apiserver.log.read_text()[-3000:]
            time.sleep(0.05)

    def send(self, method: str, path: str, body: Json | None = None) -> Json:
        """Return the answer to one request; raises urllib.error.HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, head, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
            found: Json = json.loads(answer.read())
        return found

    def _status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5, context=self._tls) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    # --- use ------------------------------------------------------------------------------
    def kubectl(self, *argv: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """Return the output of `kubectl ARGV…`; raise AssertionError on failure."""
        done = self.try_kubectl(*argv, stdin=stdin, kubeconfig=kubeconfig)
        assert done.returncode == 0, f"kubectl {' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def program(self) -> Path:
        """The path of kubectl."""
        return self._folder / "kubectl"

    def try_kubectl(
        self, *argv: str, stdin: str | None = None, kubeconfig: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run `kubectl ARGV…` with any exit code; as the administrator or the kubeconfig's user."""
        return subprocess.run(
            [self.program, "--kubeconfig", kubeconfig or self.kubeconfig, *argv],
            # Its cache of discovered kinds belongs to this cluster and is removed with it.
            env={"HOME": str(self.base), "PATH": "/usr/bin:/bin"},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def get(self, *argv: str) -> Json:
        """Return the object that `kubectl get ARGV… -o json` printed."""
        found: Json = json.loads(self.kubectl("get", *argv, "-o", "json"))
        return found

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """Make a namespace with a unique name; on exit its deletion begins."""
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            # it takes seconds, and nobody waits
            self.kubectl("delete", "namespace", name, "--wait=false")

    def kubeconfig_of(self, name: str, pair: Pair) -> Path:
        """Write a kubeconfig, `<name>.kubeconfig`, for the user named by a pair of `authority`."""
        path = self.base / f"{name}.kubeconfig"
        user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        server = {"server": self.url, "certificate-authority": str(self.authority.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config))
        return path

    # --- programs -------------------------------------------------------------------------
    def _etcd(self) -> list[str]:
        # Sockets named `etcd:0` and `peer:0` in its folder: etcd requires host:port even for a
        # file.
        clients, peers = "unix://etcd:0", "unix://peer:0"
        return [
            str(self._folder / "etcd"),
            "--name=test",
            f"--data-dir={self.base}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=test={peers}",
            "--log-level=warn",
        ]

    def _apiserver(self) -> list[str]:
        hosts = ["127.0.0.1", "localhost", "kubernetes.default.svc", "10.96.0.1"]
        serving = self.authority.sign("apiserver", "kube-apiserver", hosts=hosts)
        proxy = self.front_proxy.sign("front-proxy", "front-proxy")
        kubelets = self.authority.sign(
            "kubelet-client", "apiserver-kubelet-client", groups=["system:masters"]
        )
        private, public = self._tokens
        return [
            *(
                "env",
                "GOGC=400",
            ),  # otherwise a fifth of its CPU is garbage collection; all here share two CPUs
            str(self._folder / "kube-apiserver"),
            "--etcd-servers=unix://etcd:0",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port.getsockname()[1]}",
            "--permit-port-sharing",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.certificate}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={kubelets.certificate}",
            f"--kubelet-client-key={kubelets.key}",
            "--kubelet-preferred-address-types=Hostname",
            f"--service-cluster-ip-range={_SERVICES}",
            f"--service-account-issuer={self.url}",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={private}",
            f"--requestheader-client-ca-file={self.front_proxy.certificate}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={proxy.certificate}",
            f"--proxy-client-key-file={proxy.key}",
        ]

    def _controllers(self) -> list[str]:
        return [
            str(self._folder / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self._tokens[0]}",
            f"--root-ca-file={self.authority.certificate}",
            f"--service-cluster-ip-range={_SERVICES}",
            "--leader-elect=false",
            "--secure-port=0",
        ]
