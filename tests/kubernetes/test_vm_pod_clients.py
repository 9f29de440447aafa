"""The commands of kubectl on a pod that is a VM, next to one that is a container."""

import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.platform import until
from tests.kubernetes.pod_node import BOOT_S, CTRL_BRACKET, PodNode, box, guest

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
]


HOST_PORT = 32022
ROTATING = {
    "containerLogMaxSize": "16Ki",
    "containerLogMaxFiles": 3,
    "containerLogMonitorInterval": "3s",
}
FLOOD = "for i in $(seq 300); do echo a-line-of-the-log-$i >/dev/console; done"


@pytest.fixture(scope="module")
def pods(pod_node: PodNode) -> Iterator[PodNode]:
    """A namespace with the running pods `guest`, a VM, and `box`, a container."""
    with pod_node.apart("clients") as own:
        ports = [{"containerPort": 22, "hostPort": HOST_PORT}]
        own.apply(guest("guest", vm={"stdin": True, "tty": True, "ports": ports}), box("box"))
        own.wait("condition=Ready", "pod/guest", "pod/box")
        own.booted("guest")
        yield own


@pytest.mark.parametrize(("pod", "word"), [("guest", "GUEST-READY"), ("box", "box")])
def test_logs_are_followed(pods: PodNode, pod: str, word: str) -> None:
    argv = pods.words("logs", "-f", pod)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as following:
        ends = threading.Timer(BOOT_S, following.kill)
        ends.start()
        try:
            assert following.stdout is not None
            assert any(word in line for line in following.stdout), f"{pod}'s log has no {word!r}"
        finally:
            ends.cancel()
            following.kill()


def test_the_log_has_options_of_kubectl(pods: PodNode) -> None:
    assert len(pods.kubectl("logs", "guest", "--tail=1").splitlines()) == 1
    assert re.match(r"20\d\d-\d\d-\d\dT", pods.kubectl("logs", "guest", "--timestamps"))


@pytest.mark.parametrize(("pod", "words"), [("guest", []), ("box", ["/bin/busybox"])])
def test_exec_has_output_input_and_the_exit_code(pods: PodNode, pod: str, words: list[str]) -> None:
    shell = (*words, "sh", "-c")
    assert pods.kubectl("exec", pod, "--", *shell, "echo $((6*7))") == "42\n"
    assert pods.kubectl("exec", "-i", pod, "--", *words, "cat", stdin="typed") == "typed"
    argv = pods.words("exec", pod, "--", *shell, "exit 5")
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 5


def test_exec_has_a_terminal(pods: PodNode) -> None:
    with pods.terminal("exec", "-it", "guest", "--", "sh") as user:
        user.type(b"tty; exit 4\n")
        user.until(b"/dev/pts/")
        assert user.ended() == 4


def test_attach_is_the_console_and_leaves_the_guest_running(pods: PodNode) -> None:
    with pods.terminal("attach", "-it", "guest") as user:
        user.type(b"\necho at$((1+1))ached\n")
        user.until(b"at2ached")
        user.type(CTRL_BRACKET)
        assert user.ended() == 0
    assert pods.container("guest")["restartCount"] == 0


def test_a_port_of_the_guest_is_forwarded(pods: PodNode) -> None:
    argv = pods.words("port-forward", "guest", ":22")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as forwarding:
        try:
            assert forwarding.stdout is not None
            told = re.search(r"127\.0\.0\.1:(\d+)", forwarding.stdout.readline())
            assert told
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", int(told[1])), timeout=30) as client:
                    assert client.recv(4) == b"SSH-"
        finally:
            forwarding.kill()


def test_a_host_port_leads_to_the_guest(pods: PodNode) -> None:
    address = pods.pod("guest")["status"]["hostIP"]
    with socket.create_connection((address, HOST_PORT), timeout=30) as client:
        assert client.recv(4) == b"SSH-"


def test_files_are_copied_both_ways(pods: PodNode, tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    sent.write_bytes(bytes(range(256)) * 4096)
    pods.kubectl("cp", str(sent), "guest:/root/copied")
    pods.kubectl("cp", "guest:/root/copied", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == sent.read_bytes()


def test_describe_shows_the_state_and_the_events(pods: PodNode) -> None:
    told = pods.kubectl("describe", "pod", "guest")
    address = pods.pod("guest")["status"]["podIP"]
    (vm,) = pods.vms()
    assert vm["interfaces"][0]["addresses"][0].partition("/")[0] == address
    for part in ("State: +Running", f"IP: +{address}", "Started", "Created", "virtlet.cloud/tiny"):
        assert re.search(part, told), (part, told)


def test_a_digest_of_another_image_is_an_event_and_a_state_of_the_pod(pods: PodNode) -> None:
    name = f"virtlet.cloud/tiny@sha256:{'b' * 64}"
    pods.apply(guest("mismatch", vm={"image": name}))
    until(lambda: "digest_mismatch" in pods.events("mismatch"), lambda: pods.events("mismatch"))
    assert "ErrImagePull" in pods.events("mismatch")

    def waiting() -> str:
        return str(pods.container("mismatch").get("state", {}).get("waiting", {}))

    until(lambda: "digest_mismatch" in waiting(), "the state has the text", within_s=60)
    pods.delete("mismatch")


def test_kubelet_measures_pods_of_both_runtimes(pods: PodNode) -> None:
    """Its Prometheus text has the CPU time and the memory of each."""

    def value(metric: str, pod: str) -> float:
        labels = f'namespace="{pods.namespace}",pod="{pod}"'
        line = re.compile(f"^{metric}{{[^}}]*{labels}[^}}]*}} ([^ ]+)", re.MULTILINE)
        found = line.search(pods.measurements())
        return float(found[1]) if found else 0.0

    cpu, memory = "container_cpu_usage_seconds_total", "container_memory_working_set_bytes"
    measured = [(metric, pod) for metric in (cpu, memory) for pod in ("guest", "box")]
    until(lambda: all(value(*one) > 0 for one in measured), "each is measured")
    assert value(memory, "guest") > 16 * 1024**2


def test_kubelet_shows_the_ephemeral_storage_of_a_vm_pod(pods: PodNode) -> None:
    def used() -> int:
        return int(pods.summary("guest").get("ephemeral-storage", {}).get("usedBytes", 0))

    with pods.host.kubelet_settings(localStorageCapacityIsolation=True):
        pods.restart_kubelet()
        until(lambda: used() > 1024**2, "the disk counts")
        assert pods.pod("guest")["status"]["phase"] == "Running"
    pods.restart_kubelet()


def test_kubelet_rotates_the_log_and_the_guest_writes_to_the_next_file(pods: PodNode) -> None:
    """kubelet asks for lists in parts meanwhile, and logs it if a runtime does not have them."""
    uid = pods.pod("guest")["metadata"]["uid"]
    folder = pods.host.base / "logs" / f"{pods.namespace}_guest_{uid}" / "vm"
    with pods.host.kubelet_settings(**ROTATING, featureGates={"CRIListStreaming": True}):
        before = pods.host.kubelet.log.stat().st_size
        pods.restart_kubelet()
        argv = pods.words("exec", "guest", "--", "sh", "-c", FLOOD)
        until(lambda: not subprocess.call(argv), "the next kubelet knows the pod")
        until(lambda: list(folder.glob("0.log.*")), "kubelet has rotated the log")
        pods.kubectl("exec", "guest", "--", "sh", "-c", "echo af$((1+1))ter >/dev/console")
        pods.logged("guest", b"af2ter", within_s=60)
        assert b"af2ter" in (folder / "0.log").read_bytes()
        told = pods.host.kubelet.log.read_bytes()[before:].splitlines()
        assert [line for line in told if b"falling back" in line] == []
        assert pods.container("guest")["restartCount"] == 0
    pods.restart_kubelet()
