"""A Kubernetes node on this host: containerd, virtbus-cri, the proxy of both, and kubelet.

virtbus itself runs next to it (tests/e2e/platform.py). Each program is one that a test may kill and
start again. Containers use the host's network: a pod network of containers is not under test.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from cri_api.v1 import api_pb2
from tests.e2e.platform import Platform, until
from tests.kubernetes.cluster import Program

from virtbus.cli.cri.host_files import CONTAINERD, HostFiles

NAME = "localhost"
"""The node's name; the API server reaches kubelet by it."""
ADDRESS = "10.99.0.1"
"""The node's address: kubelet refuses to be a node on loopback's own."""
BOX, PAUSE = "test.local/box:1", "test.local/pause:1"
BUSYBOX = Path("/usr/bin/busybox")
CGROUPS = Path("/sys/fs/cgroup")

OF_KUBELET = (
    Path("/var/lib/kubelet/device-plugins"),
    Path("/var/lib/kubelet"),
    Path("/var/log/containers"),
)
"""Folders that kubelet makes with any settings."""

Json = dict[str, Any]
LOOPBACK: Json = {"cniVersion": "0.4.0", "name": "lo", "plugins": [{"type": "loopback"}]}


def image(name: str, *entrypoint: str) -> bytes:
    """Return a container image of busybox alone, as `ctr images import` reads it."""
    layer = _tar({"bin/busybox": BUSYBOX.read_bytes(), "etc/passwd": b"root:x:0:0::/:/bin/sh\n"})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"config.json": config, "manifest.json": manifest}
    encoded = {key: json.dumps(value).encode() for key, value in files.items()}
    return _tar({**encoded, "layer.tar": layer})


def _tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, body in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(body), 0o755
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def _kill_with_children(pid: int) -> None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (pid, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(one, 9)


class ContainerHost:
    """The programs of one node. All methods block. `kubeconfig` is the node's; None: no cluster."""

    mirrors: Mapping[str, str] = MappingProxyType({})
    """The server (host:port) that is asked for the images of each registry, by plain HTTP."""
    network: Mapping[str, Any] = LOOPBACK
    """The CNI network of pods that are containers."""

    def __init__(
        self, platform: Platform, kubelet: Path, debian: Path, kubeconfig: Path | None, ca: Path
    ) -> None:
        self.platform = platform
        self.base = platform.base / "node"
        self.manifests = self.base / "manifests"
        self._debian = debian
        for folder in (self.manifests, self.base / "cni", self.base / "logs"):
            folder.mkdir(parents=True)
        self.containerd_socket = self.base / "containerd.sock"
        self.socket = platform.run_dir / "criproxy.sock"
        # What `virtbus cri install` writes; the command itself needs systemd.
        self._files = HostFiles(self.base / "root")
        self._files.write(CONTAINERD)
        shutil.copy(self._files.runtime_class, self.base)
        self._write_containerd()
        self._write_kubelet(kubeconfig, ca)
        environ = [f"{key}={value}" for key, value in platform.environ.items()]
        python = ["env", *environ, sys.executable, "-m"]
        config = ["--config", str(self.base / "kubelet.yaml")]
        login = [] if kubeconfig is None else ["--kubeconfig", str(kubeconfig)]
        self.containerd = Program(
            [
                "env",
                f"PATH={debian}/usr/bin:{debian}/usr/sbin:{os.environ['PATH']}",
                str(debian / "usr/bin/containerd"),
                "-c",
                str(self.base / "containerd.toml"),
            ],
            self.base / "containerd.log",
        )
        # kubelet's own login lets it read the node's pods
        self.cri = Program(
            [*python, "virtbus.cri", "--cgroup-driver", "cgroupfs", *login], self.base / "cri.log"
        )
        self.proxy = Program(
            [*python, "virtbus.criproxy", "--container-runtime", str(self.containerd_socket)],
            self.base / "proxy.log",
        )
        self.kubelet = Program(
            [
                str(kubelet),
                *config,
                *login,
                f"--hostname-override={NAME}",
                f"--node-ip={ADDRESS}",
                f"--root-dir={self.base}/kubelet",
                f"--cert-dir={self.base}/kubelet/pki",
                "--v=2",
            ],
            self.base / "kubelet.log",
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all programs; the node is not Ready yet on entry."""
        with self.runtimes():
            self.kubelet.start()
            try:
                yield
            finally:
                self.kubelet.stop()

    @contextmanager
    def runtimes(self) -> Iterator[None]:
        """Run all programs but kubelet."""
        with ExitStack() as stack:
            stack.callback(self._clean)
            address = (f"{ADDRESS}/32", "dev", "lo")
            subprocess.run(["ip", "address", "add", *address], check=True)
            stack.callback(subprocess.run, ["ip", "address", "delete", *address], check=True)
            for program in (self.containerd, self.cri, self.proxy):
                program.start()
                stack.callback(program.stop)
            until(self.answers, "the proxy answers with both runtimes")
            self._import(PAUSE, "/bin/busybox", "sleep", "100000")
            self._import(BOX, "/bin/busybox", "sh", "-c")
            yield

    @contextmanager
    def kubelet_settings(self, **changed: Any) -> Iterator[None]:
        """Change kubelet's settings, which it reads at its next start, until the end."""
        config = self.base / "kubelet.yaml"
        plain = config.read_text()
        config.write_text(json.dumps(json.loads(plain) | changed))
        try:
            yield
        finally:
            config.write_text(plain)

    @contextmanager
    def pod_cgroups(self) -> Iterator[None]:
        """Let kubelet make a cgroup for each pod, below one of this node; in-place resizes need it.

        kubelet reads that at its next start. At the end it is stopped, and starts without it.
        """
        name = self.platform.base.name
        roots = [one.parent / name for one in CGROUPS.glob("*/cgroup.procs")]
        config = self.base / "kubelet.yaml"
        plain = config.read_text()
        try:
            for root in roots:
                root.mkdir()
            pods = {"cgroupsPerQOS": True, "cgroupRoot": f"/{name}"}
            config.write_text(json.dumps(json.loads(plain) | pods))
            yield
        finally:
            self.kubelet.kill()
            config.write_text(plain)
            for root in roots:
                inside = sorted(one for one in root.rglob("*") if one.is_dir())
                for folder in (*reversed(inside), root):
                    folder.rmdir()

    def power_off(self) -> None:
        """End all processes of the node's programs, its mounts and what is in memory only."""
        for program in (self.kubelet, self.proxy, self.cri, self.containerd):
            program.kill()
        self._unmount()
        shutil.rmtree(self.base / "containerd-state", ignore_errors=True)

    def power_on(self) -> None:
        """Start the node's programs; virtbus runs already."""
        for program in (self.containerd, self.cri, self.proxy):
            program.start()
        until(self.answers, "the proxy answers with both runtimes")
        self.kubelet.start()  # without a runtime it would end, and systemd would start it again

    def _unmount(self) -> None:
        """End what containerd's shims still run, and undo all mounts in the node's folder."""
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self.containerd_socket).encode() in process.read_bytes():
                    _kill_with_children(int(process.parent.name))
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([one for one in mounts if one.startswith(str(self.base))]):
            subprocess.run(["umount", "-l", mount], check=False)

    def _clean(self) -> None:
        self._unmount()
        shutil.rmtree(self.base, ignore_errors=True)
        for path in OF_KUBELET:
            with suppress(OSError):  # absent, or a kubelet of this machine uses it
                path.rmdir()

    # --- use ------------------------------------------------------------------------------
    def answers(self) -> bool:
        """Return True if both runtimes answer through the proxy."""
        with suppress(grpc.RpcError):
            return all(one.status for one in self.call("Status").status.conditions)
        return False

    def call(self, name: str, **request: Any) -> Any:
        """Call the proxy's RuntimeService."""
        method = api_pb2.DESCRIPTOR.services_by_name["RuntimeService"].methods_by_name[name]
        asked = getattr(api_pb2, method.input_type.name)
        answered = getattr(api_pb2, method.output_type.name)
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            send: Any = channel.unary_unary(f"/runtime.v1.RuntimeService/{name}")
            return answered.FromString(send(asked(**request).SerializeToString(), timeout=30))

    def containers(self) -> dict[str, tuple[str, int]]:
        """Return the pod, and the attempt, of each running container by its id."""
        running = {"state": {"state": "CONTAINER_RUNNING"}}
        listed = self.call("ListContainers", filter=running).containers
        return {
            one.id: (one.labels["io.kubernetes.pod.name"], one.metadata.attempt) for one in listed
        }

    def pods(self) -> set[str]:
        """Return the names of the pods with a running container."""
        with suppress(grpc.RpcError):
            return {pod for pod, _ in self.containers().values()}
        return set()

    def _import(self, name: str, *entrypoint: str) -> None:
        archive = self.base / "image.tar"
        archive.write_bytes(image(name, *entrypoint))
        ctr = [str(self._debian / "usr/bin/ctr"), "-a", str(self.containerd_socket)]
        subprocess.run(
            [*ctr, "-n", "k8s.io", "images", "import", str(archive)],
            check=True,
            capture_output=True,
        )

    # --- files ----------------------------------------------------------------------------
    def _write_containerd(self) -> None:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        text = f"""\
version = 2
root = "{self.base}/containerd"
state = "{self.base}/containerd-state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{self.containerd_socket}"
[{cri}]
restrict_oom_score_adj = true
disable_apparmor = true
sandbox_image = "{PAUSE}"
[{cri}.cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{self.base}/cni"
[{cri}.containerd]
snapshotter = "native"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
BinaryName = "{self._debian}/usr/sbin/runc"
SystemdCgroup = false
"""
        for registry, server in self.mirrors.items():
            text += f"""\
[{cri}.registry.mirrors."{registry}"]
endpoint = ["http://{server}"]
"""
        (self.base / "containerd.toml").write_text(text)
        (self.base / "cni" / "10-pods.conflist").write_text(json.dumps(self.network))

    def _write_kubelet(self, kubeconfig: Path | None, ca: Path) -> None:
        config: Json = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "clusterDomain": "cluster.local",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": False,
            "localStorageCapacityIsolation": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(ca)},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "staticPodPath": str(self.manifests),
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "50Mi"},
            "registerNode": kubeconfig is not None,
            "enableServer": kubeconfig is not None,
            "volumePluginDir": str(self._files.driver.parents[1]),
            "podLogsDir": str(self.base / "logs"),
            "syncFrequency": "5s",
            "fileCheckFrequency": "2s",
        }
        (self.base / "kubelet.yaml").write_text(json.dumps(config))
