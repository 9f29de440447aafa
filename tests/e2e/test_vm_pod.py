"""A pod that is a VM: kubelet's calls over the socket, a real guest behind them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2
from services.cri.tests.stream_clients import SpdyClient
from tests.e2e import host
from tests.e2e.platform import NODE, Platform, until

pytestmark = pytest.mark.e2e

LIMIT_BYTES = 128 * 1024**2


class Runtime:
    """`virtbus-cri` as a process, and a client of its socket."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.socket = platform.run_dir / "cri.sock"
        self.pods = platform.base / "pods"
        self.volumes: dict[str, Any] = {}
        """The mounts and devices of each attempt."""

    @contextmanager
    def running(self, *, killed: bool) -> Iterator[None]:
        """Run the process, until it is `killed` or stopped."""
        argv = [sys.executable, "-m", "virtbus.cri"]
        process = subprocess.Popen(argv, env=self.platform.environ)
        try:
            until(self.ready, "virtbus-cri is ready")
            assert process.poll() is None
            yield
        finally:
            if killed:
                process.kill()
            else:
                process.terminate()
            process.wait(20)

    def ready(self) -> bool:
        """Return True if the socket answers, and all conditions are true."""
        with suppress(grpc.RpcError):
            return all(one.status for one in self.call("Status").status.conditions)
        return False

    def bus(self) -> bool:
        """Return True if the bus answers, by the runtime's own condition."""
        return bool(self.call("Status").status.conditions[2].status)

    def call(self, name: str, **request: Any) -> Any:
        """Call RuntimeService, or ImageService for calls about images."""
        kind = "ImageService" if "Image" in name else "RuntimeService"
        method = api_pb2.DESCRIPTOR.services_by_name[kind].methods_by_name[name]
        asked = getattr(api_pb2, method.input_type.name)
        answered = getattr(api_pb2, method.output_type.name)
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            send = channel.unary_unary(
                f"/runtime.v1.{kind}/{name}", asked.SerializeToString, answered.FromString
            )
            return send(asked(**request), timeout=100)

    def start(self, sandbox_id: str, image: str, attempt: int) -> str:
        """Create and start the next attempt of the container."""
        config = {
            "metadata": {"name": "vm", "attempt": attempt},
            "image": {"image": image},
            "log_path": f"vm/{attempt}.log",
            "linux": {"resources": {"memory_limit_in_bytes": LIMIT_BYTES}},
            **self.volumes,
        }
        created = self.call("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
        self.call("StartContainer", container_id=created.container_id)
        return str(created.container_id)

    def address(self, sandbox_id: str) -> str:
        """Return the address in PodSandboxStatus."""
        answer = self.call("PodSandboxStatus", pod_sandbox_id=sandbox_id)
        return str(answer.status.network.ip)

    def status(self, container_id: str) -> Any:
        """ContainerStatus."""
        return self.call("ContainerStatus", container_id=container_id).status

    def log(self, attempt: int) -> bytes:
        """Return the log of an attempt, as kubelet reads it."""
        path = self.pods / "vm" / f"{attempt}.log"
        return path.read_bytes() if path.exists() else b""


@contextmanager
def block_device(folder: Path, size_bytes: int = 8 * 1024**2) -> Iterator[str]:
    """A block device of the host, whose content is the file `data` in `folder`."""
    path = folder / "data"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    argv = ["losetup", "--find", "--show", str(path)]
    device = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


DISKS = "for d in /sys/block/vd*; do echo $(cat $d/serial) ${d##*/} $(cat $d/size); done"


def disks(runtime: Runtime, container_id: str) -> dict[str, tuple[str, int]]:
    """Return the guest's name and the bytes of each disk of a container's guest by serial."""
    done = runtime.call("ExecSync", container_id=container_id, cmd=["sh", "-c", DISKS])
    words = [line.split() for line in done.stdout.decode().splitlines()]
    return {serial: (name, int(sectors) * 512) for serial, name, sectors in words}


@contextmanager
def bus_away(platform: Platform) -> Iterator[None]:
    """Kill the server of the bus, and keep `up` from starting another one meanwhile."""
    platform.kill("up", signal.SIGSTOP)
    dead = platform.kill("nats-server")
    try:
        yield
    finally:
        platform.kill("up", signal.SIGCONT)
    platform.wait_back("nats-server", dead)


OF_UP = "VIRTBUS_PARENT_FD"
"""A descriptor that only children of `virtbus up` have."""


@contextmanager
def restarted_agent(platform: Platform) -> Iterator[None]:
    """Kill the agent, and run it again and again while the bus is away, as systemd does."""
    process = Path("/proc", str(platform.pid("nodeagent")))
    argv = (process / "cmdline").read_text().split("\0")[:-1]
    words = (one.partition("=") for one in (process / "environ").read_text().split("\0"))
    environ = {name: value for name, _, value in words if name not in {"", OF_UP}}
    platform.kill("nodeagent")
    loop = ["sh", "-c", 'while :; do "$@"; sleep 0.5; done', "sh", *argv]
    with subprocess.Popen(loop, env=environ, start_new_session=True) as running:
        try:
            yield
        finally:
            os.killpg(running.pid, signal.SIGKILL)


def stopped(runtime: Runtime, container_id: str) -> bool:
    """Return True once StopContainer has ended a guest; its agent may not serve yet."""
    with suppress(grpc.RpcError):
        runtime.call("StopContainer", container_id=container_id, timeout=30)
        return True
    return False


async def attach_and_forward(runtime: Runtime, sandbox_id: str, container_id: str) -> None:
    """Type into the guest's console, and read what its SSH server says."""
    wanted = {"stdin": True, "stdout": True, "tty": True}
    url = runtime.call("Attach", container_id=container_id, **wanted).url
    async with SpdyClient(url, "v4.channel.k8s.io") as client:
        error, stdin, stdout, _ = (
            client.open(streamtype=name) for name in ("error", "stdin", "stdout", "resize")
        )
        client.send(stdin, b"echo at$((1+1))ached\n")
        await client.until(stdout, b"at2ached")
        client.send(stdin, b"\x1d")
        assert (await client.status(error))["status"] == "Success"
    url = runtime.call("PortForward", pod_sandbox_id=sandbox_id).url
    async with SpdyClient(url, "portforward.k8s.io") as client:
        named = {"port": "22", "requestid": "0"}
        client.open(streamtype="error", **named)
        await client.until(client.open(streamtype="data", **named), b"SSH-2.0-dropbear")
    command = ["sh", "-c", "tty; cat; exit 7"]
    url = runtime.call("Exec", container_id=container_id, cmd=command, **wanted).url
    async with SpdyClient(url, "v4.channel.k8s.io") as client:
        error, stdin, stdout, _ = (
            client.open(streamtype=name) for name in ("error", "stdin", "stdout", "resize")
        )
        await client.until(stdout, b"/dev/pts/")
        client.send(stdin, b"typed\n\x04")
        assert (await client.status(error))["details"]["causes"][0]["message"] == "7"
        assert b"typed" in client.got[stdout]


LESS = {"cpu_shares": 300, "cpu_quota": 90_000, "cpu_period": 100_000} | {
    "memory_limit_in_bytes": LIMIT_BYTES * 3 // 4
}


def resize(runtime: Runtime, container_id: str) -> None:
    """Change the resources of a running container; its guest has less memory afterwards."""

    def total() -> int:
        command = ["sh", "-c", "head -1 /proc/meminfo"]
        done = runtime.call("ExecSync", container_id=container_id, cmd=command)
        return int(done.stdout.split()[1]) * 1024

    before = total()
    runtime.call("UpdateContainerResources", container_id=container_id, linux=LESS)
    assert before - total() > LIMIT_BYTES // 5
    assert has(runtime, container_id, LESS)


def has(runtime: Runtime, container_id: str, resources: dict[str, int]) -> bool:
    """Return True if ContainerStatus shows these resources."""
    linux = runtime.status(container_id).resources.linux
    return {name: getattr(linux, name) for name in resources} == resources


DNS = {
    "servers": ["10.96.0.10", "10.96.0.11"],
    "searches": ["default.svc.cluster.local", "svc.cluster.local"],
    "options": ["ndots:5"],
}
HOSTS = (
    "# Kubernetes-managed hosts file.\n10.1.2.3\tnode\n\n"
    "# Entries added by HostAliases.\n192.0.2.7\tdb.example\tdb\n"
)


def assert_names(runtime: Runtime, container_id: str) -> None:
    """Check that the guest has the pod's DNS settings and host aliases."""
    script = "cat /etc/resolv.conf; grep -v '^#' /etc/hosts"
    done = runtime.call("ExecSync", container_id=container_id, cmd=["sh", "-c", script])
    assert done.stdout.decode().splitlines() == [
        "search default.svc.cluster.local svc.cluster.local",
        "nameserver 10.96.0.10",
        "nameserver 10.96.0.11",
        "127.0.0.1\tlocalhost",
        "127.0.1.1\tweb",
        "::1\tlocalhost",
        "192.0.2.7\tdb.example\tdb",
    ]


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Closes everything that it holds at the end of the test."""
    with ExitStack() as stack:
        yield stack


def test_a_pod_is_a_vm_from_its_sandbox_to_its_removal(patient: Platform, held: ExitStack) -> None:
    platform = patient  # the bus is killed
    runtime = Runtime(platform)
    identity = {"name": "web", "uid": "0c5f", "namespace": "default"}
    sandbox = {"metadata": identity, "hostname": "web", "log_directory": str(runtime.pods)}
    sandbox |= {"dns_config": DNS}
    folder = "/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~empty-dir/cache"
    device = held.enter_context(block_device(platform.base))
    hosts = runtime.pods / "0c5f" / "etc-hosts"
    hosts.parent.mkdir(parents=True)
    hosts.write_text(HOSTS)
    runtime.volumes = {
        "mounts": [
            {"host_path": folder, "container_path": "/cache"},
            {"host_path": str(hosts), "container_path": "/etc/hosts"},
        ],
        "devices": [{"host_path": device, "container_path": "/dev/x", "permissions": "mrw"}],
    }
    with runtime.running(killed=True):
        image = runtime.call("PullImage", image={"image": "virtlet.cloud/tiny:latest"}).image_ref
        ran = runtime.call("RunPodSandbox", config=sandbox, runtime_handler="virtbus")
        sandbox_id = ran.pod_sandbox_id
        (vm,) = platform.vms()
        platform.uids.add(vm["uid"])
        assert vm["state"] == "Stopped"
        before = runtime.address(sandbox_id)
        first = runtime.start(sandbox_id, image, 0)
        (vm,) = platform.vms()
        assert (vm["node"], vm["owner"]) == (NODE, f"cri-{NODE}")
        assert vm["labels"]["io.kubernetes.pod.name"] == "web"
        platform.wait_ready(vm["name"])
        until(lambda: b"GUEST-READY" in runtime.log(0), "the guest's lines are in the log")
        assert runtime.address(sandbox_id) == before
        assert host.ping(before)
        asyncio.run(attach_and_forward(runtime, sandbox_id, first))
        done = runtime.call("ExecSync", container_id=first, cmd=["sh", "-c", "id -u; exit 3"])
        assert (done.exit_code, done.stdout) == (3, b"0\n")
        assert_names(runtime, first)
        there = disks(runtime, first)
        assert there["cache-disk"][1] == 10 * 1024**3
        name, size_bytes = next(there[one] for one in there if one.startswith("device-"))
        assert size_bytes == 8 * 1024**2
        write = f"echo written | dd of=/dev/{name} conv=notrunc && sync"
        runtime.call("ExecSync", container_id=first, cmd=["sh", "-c", write])
        resize(runtime, first)
    with runtime.running(killed=False):  # the guest ran on, and the lists are the same
        assert has(runtime, first, LESS)
        (listed,) = runtime.call("ListContainers").containers
        assert (listed.id, listed.state) == (first, api_pb2.CONTAINER_RUNNING)
        assert host.ping(runtime.address(sandbox_id))
        (usage,) = runtime.call("ListContainerStats").stats
        assert usage.cpu.usage_core_nano_seconds.value > 10**8
        assert usage.memory.working_set_bytes.value > LIMIT_BYTES // 8
        assert usage.writable_layer.used_bytes.value > 0
        (of_pod,) = runtime.call("ListPodSandboxStats").stats
        assert of_pod.linux.process.process_count.value == 1
        nic = of_pod.linux.network.default_interface
        assert min(nic.rx_bytes.value, nic.tx_bytes.value) > 1000
        runtime.call("StopContainer", container_id=first, timeout=20)
        ended = runtime.status(first)
        assert (ended.state, ended.exit_code) == (api_pb2.CONTAINER_EXITED, 0)
        assert (platform.base / "data").read_bytes().startswith(b"written\n")
        second = runtime.start(sandbox_id, image, 1)
        until(lambda: b" stdout F " in runtime.log(1), "the second run has a log of its own")
        assert runtime.status(second).state == api_pb2.CONTAINER_RUNNING
        assert [one["uid"] for one in platform.vms()] == [vm["uid"]]
        until(lambda: b"GUEST-READY" in runtime.log(1), "the second run is ready")
        assert_names(runtime, second)
        with bus_away(platform):
            until(lambda: not runtime.bus(), "the runtime has noticed")
            with restarted_agent(platform):
                until(lambda: stopped(runtime, second), "an agent without the bus ends the guest")
            ended = runtime.status(second)
            assert (ended.state, ended.exit_code) == (api_pb2.CONTAINER_EXITED, 0)
            runtime.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
            runtime.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
        until(lambda: not platform.vms(), "the VM is gone with its pod")


SENT = "container_network_transmit_bytes_total"
SYSTEM = "53008994-44c0-4017-ad44-9c49758083da"
NICS = "for i in eth0 eth1; do ip -4 -o address show $i; done; cat /sys/class/dmi/id/product_uuid"


def test_a_pod_with_two_networks_has_two_nics(
    patient: Platform, cni_network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform, runtime = patient, Runtime(patient)
    until(lambda: cni_network in platform.cli("network", "list"), "netd tells of the network")
    platform.cli("network", "create", "green", "--kind", "isolated", "--subnet", "10.198.0.0/24")
    monkeypatch.setitem(platform.environ, "VIRTBUS_POD_NETWORK", cni_network)
    identity = {"name": "web", "uid": "2e", "namespace": "default"}
    sandbox = {"metadata": identity, "log_directory": str(runtime.pods)}
    with runtime.running(killed=False):
        image = runtime.call("PullImage", image={"image": "virtlet.cloud/tiny:latest"}).image_ref
        notes = {"k8s.v1.cni.cncf.io/networks": "green", "VirtletSystemUUID": SYSTEM}
        sandbox |= {"annotations": notes}
        sandbox_id = runtime.call("RunPodSandbox", config=sandbox).pod_sandbox_id
        container_id = runtime.start(sandbox_id, image, 0)
        (vm,) = platform.vms()
        platform.uids.add(vm["uid"])
        platform.wait_ready(vm["name"])
        address = runtime.address(sandbox_id)
        assert address.startswith("10.199.0.")
        assert host.ping(address)
        done = runtime.call("ExecSync", container_id=container_id, cmd=["sh", "-c", NICS])
        assert f"inet {address}/24" in done.stdout.decode()
        assert "inet 10.198.0." in done.stdout.decode()
        assert SYSTEM in done.stdout.decode().lower()
        (metrics,) = runtime.call("ListPodSandboxMetrics").pod_metrics
        sent = [one for one in metrics.metrics if one.name == SENT]
        assert [one.label_values[2] for one in sent] == ["eth0", "eth1"]
        assert sent[0].value.value > 0  # netd answers DHCP before the host's end
        runtime.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
        runtime.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
        until(lambda: not platform.vms(), "the VM is gone with its pod")
    platform.cli("network", "delete", "green")


def test_a_root_disk_on_a_volume_of_kubernetes_outlives_its_pods(
    patient: Platform, held: ExitStack
) -> None:
    platform, runtime = patient, Runtime(patient)
    held.enter_context(block_device(platform.base, 1024**3))
    file = str(platform.base / "data")  # a local volume may be one; kubelet makes its device
    at_the_root = {"host_path": file, "container_path": "/", "permissions": "mrw"}
    runtime.volumes = {"devices": [at_the_root]}
    with runtime.running(killed=False):
        image = runtime.call("PullImage", image={"image": "virtlet.cloud/tiny:latest"}).image_ref
        found = []
        for uid in ("1a", "1b"):
            identity = {"name": "db-0", "uid": uid, "namespace": "default"}
            sandbox = {"metadata": identity, "log_directory": str(runtime.pods / uid)}
            sandbox_id = runtime.call("RunPodSandbox", config=sandbox).pod_sandbox_id
            container_id = runtime.start(sandbox_id, image, 0)
            (vm,) = platform.vms()
            platform.uids.add(vm["uid"])
            platform.wait_ready(vm["name"])
            name, size_bytes = disks(runtime, container_id)["root"]
            assert size_bytes == 1024**3 - 1024**2  # the end has the marks
            end = f"/dev/{name} bs=1M count=1"
            script = f"dd if={end} skip=900 | head -c 4; echo kept | dd of={end} seek=900; sync"
            done = runtime.call(
                "ExecSync", container_id=container_id, cmd=["sh", "-c", f"({script}) 2>/dev/null"]
            )
            found.append(done.stdout)
            runtime.call("StopContainer", container_id=container_id, timeout=20)
            runtime.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
            runtime.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
            until(lambda: not platform.vms(), "the VM is gone with its pod")
    assert found == [bytes(4), b"kept"]
