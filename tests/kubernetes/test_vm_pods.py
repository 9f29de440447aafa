"""Executes docs/howto/vm-pods.md with a real kubelet, containerd and guest, and then kills each."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from tests.e2e import host
from tests.e2e.platform import until
from tests.kubernetes.cluster import ROOT, Cluster
from tests.kubernetes.container_host import BOX, NAME, ContainerHost
from tests.kubernetes.pod_node import PodNode, guest
from tests.kubernetes.test_howto import BLOCK

from virtbus.cli.cri import host_files as files
from virtbus.cli.cri.host_files import UNITS, HostFiles

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

PAGE = ROOT / "docs" / "howto" / "vm-pods.md"
GRACE_S = 30.0
"""The grace of `guest` in the page's manifest."""
LOG_S = 180.0
"""Time of a boot on a busy machine without KVM."""
NO_SYSTEMD = ("virtbus cri install", "systemctl restart kubelet", "sed -i ")
"""Beginnings of the page's lines for which this host has no systemd and no kubeadm."""


def blocks(kind: str) -> list[str]:
    """Return the page's blocks of a language; some are indented in a list."""
    text = PAGE.read_text()
    plain = "\n".join(line.removeprefix("   ") for line in text.splitlines())
    return [body for language, body in BLOCK.findall(plain) if language == kind]


MANIFEST = next(text for kind, text in BLOCK.findall(PAGE.read_text()) if kind == "yaml")


def test_the_commands_of_the_page_lead_to_a_vm_and_a_container(
    cluster: Cluster, pod_node: PodNode, tmp_path: Path
) -> None:
    here = pod_node.host
    (tmp_path / "pods.yaml").write_text(MANIFEST)
    (tmp_path / "bin").mkdir()
    for name, words in (
        ("kubectl", f"{cluster.program} --kubeconfig={cluster.kubeconfig}"),
        ("virtbus", f"{Path(sys.executable).parent}/virtbus"),
    ):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert all(any(line.startswith(one) for line in lines) for one in NO_SYSTEMD)
    for line in lines:
        if line.startswith(NO_SYSTEMD):
            continue
        done = _followed(_here(line, here), tmp_path, here)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    until(lambda: not here.platform.vms(), "the VM is gone with its pod")


def test_pods_of_both_runtimes_survive_the_kill_of_each_program(
    cluster: Cluster, pod_node: PodNode
) -> None:
    here = pod_node.host
    cluster.kubectl("apply", "-f", "-", stdin=MANIFEST)
    ready = ("--for=condition=Ready", "pod/guest", "pod/box", "--timeout=180s")
    cluster.kubectl("wait", *ready)
    (vm,) = here.platform.vms()
    before = here.containers()
    assert {pod for pod, _ in before.values()} == {"guest", "box"}
    for program in (here.kubelet, here.cri, here.proxy, here.containerd):
        program.kill()
        program.start()
        until(here.answers, "both runtimes answer again")
        until(lambda: here.containers() == before, "the same containers run")
    here.cri.kill()  # and stays away
    assert here.containers() == before
    here.cri.start()
    until(here.answers, "both runtimes answer again")
    _follows(cluster, "box", "box")
    _follows(cluster, "guest", "GUEST-READY")
    restarts = "{.items[*].status.containerStatuses[*].restartCount}"
    assert cluster.kubectl("get", "pods", "-o", f"jsonpath={restarts}") == "0 0"
    assert [one["uid"] for one in here.platform.vms()] == [vm["uid"]]
    began = time.monotonic()
    cluster.kubectl("delete", "pod", "guest", "box", "--timeout=120s")
    assert time.monotonic() - began < GRACE_S, "the guest did not shut down by itself"
    until(lambda: not here.platform.vms(), "the VM is gone with its pod", within_s=120)


def test_a_daemon_set_installs_and_neither_its_upgrade_nor_its_end_ends_a_guest(
    pod_node: PodNode,
) -> None:
    root = pod_node.platform.base / "installed"
    (root / "run/containerd").mkdir(parents=True)
    (root / "run/containerd/containerd.sock").symlink_to(pod_node.host.containerd_socket)
    for unit in UNITS:
        HostFiles(root).unit(unit).parent.mkdir(parents=True, exist_ok=True)
        HostFiles(root).unit(unit).touch()
    manifest = yaml.safe_load(files.manifest("daemonset"))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    command = f"{Path(sys.executable).parent}/virtbus cri install --root {root}"
    container["args"] = [container["args"][0].replace("virtbus cri install", command)]
    container["command"].insert(0, "/bin/busybox")
    container["image"] = BOX
    daemons = ("-n", "kube-system")
    rollout = ("rollout", "status", "daemonset/virtbus-vm-nodes", "--timeout=120s")
    with pod_node.apart("daemon-set") as own:
        own.apply(guest("guest"))
        own.wait("condition=Ready", "pod/guest")
        before = own.pods()
        emulators = host.qemu_pids(own.vms()[0]["uid"])
        own.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        own.cluster.kubectl(*daemons, *rollout)
        until(HostFiles(root).runtime_class.exists, "the command has written its files")
        own.cluster.kubectl(*daemons, "rollout", "restart", "daemonset/virtbus-vm-nodes")
        own.cluster.kubectl(*daemons, *rollout)
        own.cluster.kubectl(*daemons, "delete", "daemonset", "virtbus-vm-nodes", "--timeout=60s")
        assert own.pods() == before
        assert host.qemu_pids(own.vms()[0]["uid"]) == emulators
        assert HostFiles(root).runtime_class.exists()


def _follows(cluster: Cluster, pod: str, word: str) -> None:
    """Read `kubectl logs -f` until a line has the word."""
    argv = [str(cluster.program), f"--kubeconfig={cluster.kubeconfig}", "logs", "-f", pod]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as following:
        ends = threading.Timer(LOG_S, following.kill)
        ends.start()
        try:
            assert following.stdout is not None
            assert any(word in line for line in following.stdout), f"{pod}'s log has no {word!r}"
        finally:
            ends.cancel()
            following.kill()


def _here(line: str, here: ContainerHost) -> str:
    """Return a line of the page with this host's names."""
    names = {
        "/etc/virtbus/runtimeclass.yaml": str(here.base / "runtimeclass.yaml"),
        " NODE ": f" {NAME} ",
        "node/NODE": f"node/{NAME}",
    }
    for told, own in names.items():
        line = line.replace(told, own)
    return line


def _followed(line: str, folder: Path, here: ContainerHost) -> "subprocess.CompletedProcess[str]":
    environ = {**here.platform.environ, "PATH": f"{folder}/bin:/usr/bin:/bin"}
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
