"""A VM pod of the full guest `debian`, whose sshd, cloud-init and agent are those of users."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.e2e.login import Login
from tests.e2e.test_debian import BOOT_S, debian_image
from tests.kubernetes.pod_node import PodNode, guest

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]

POD = "full"
DONE = ["test", "-e", "/run/cloud-init/result.json"]
"""The guest's agent runs it: the pod is ready when cloud-init is done."""


NAMES = {
    "subdomain": "shop",
    "dnsPolicy": "None",
    "dnsConfig": {
        "nameservers": ["192.0.2.53", "192.0.2.54"],
        "searches": ["shop.svc.cluster.local", "svc.cluster.local"],
        "options": [{"name": "ndots", "value": "5"}],
    },
    "hostAliases": [{"ip": "192.0.2.7", "hostnames": ["db.example", "db"]}],
}


class Full(NamedTuple):
    """The namespace of the running pod, and logins to its guest."""

    own: PodNode
    login: Login


@pytest.fixture(scope="module")
def full(pod_node: PodNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    """A ready pod of the image."""
    login = Login(tmp_path_factory.mktemp("login"), user="debian")
    sources = pod_node.platform.state_dir / "images/src"
    shutil.copy(debian_image(), sources / "debian.qcow2")
    probe = {"exec": {"command": DONE}, "timeoutSeconds": 20, "periodSeconds": 5}
    vm = {
        "image": "virtlet.cloud/debian",
        "resources": {"limits": {"memory": "512Mi"}},
        "readinessProbe": probe,
        "env": [
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
    }
    notes = {
        "VirtletSSHKeys": Path(login.public_key).read_text(),
        "VirtletCloudInitUserData": "manage_etc_hosts: true\n",
        "VirtletVCPUCount": "2",
        "VirtletRootVolumeSize": "4Gi",
    }
    with pod_node.apart("debian") as own:
        own.apply(guest(POD, notes=notes, terminationGracePeriodSeconds=120, vm=vm, **NAMES))
        own.wait("condition=Ready", f"pod/{POD}", within_s=BOOT_S)
        yield Full(own, login)


def test_a_user_logs_in_by_ssh(full: Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (vm,) = full.own.vms()
    assert full.login(vm, "id -un; sudo id -un; hostname").split() == ["debian", "root", POD]
    assert full.login(vm, "hostname -f") == f"{POD}.shop.debian.svc.cluster.local\n"
    assert full.login(vm, "cloud-init status").split() == ["status:", "done"]
    monkeypatch.setitem(full.own.platform.environ, "HOME", str(tmp_path))  # for its known hosts
    key = full.login.public_key.removesuffix(".pub")
    words = (f"debian@{vm['name']}", "-n", vm["namespace"], "-i", key, "--", "id", "-un")
    assert full.own.platform.cli("vm", "ssh", *words) == "debian\n"


def test_the_guest_has_the_size_and_the_address_of_its_pod(full: Full) -> None:
    (vm,) = full.own.vms()
    size = "nproc; df -m --output=size / | tail -n 1; free -m | awk '/Mem:/{print $2}'"
    vcpus, root_mb, memory_mb = map(int, full.login(vm, size).split())
    assert (vcpus, root_mb > 3700) == (2, True), root_mb
    assert 420 < memory_mb <= 512, "the kernel keeps a part"
    address = full.own.pod(POD)["status"]["podIP"]
    assert full.login(vm, "hostname -I").split()[0] == address
    assert f"src {address} " in full.login(vm, "ip -4 route show default")


def test_the_guest_has_the_dns_and_the_host_aliases_of_the_pod(full: Full) -> None:
    (vm,) = full.own.vms()
    told = full.login(vm, "grep -hE '^(nameserver|search)' /run/systemd/resolve/resolv.conf")
    assert told.splitlines() == [
        "nameserver 192.0.2.53",
        "nameserver 192.0.2.54",
        "search shop.svc.cluster.local svc.cluster.local",
    ]
    assert "search shop.svc.cluster.local svc.cluster.local" in full.login(
        vm, "cat /etc/resolv.conf"
    )
    assert full.login(vm, "getent hosts db").split() == ["192.0.2.7", "db.example", "db"]
    own = full.login(vm, f"grep -c '^127.0.1.1.*{POD}' /etc/hosts; grep -c db.example /etc/hosts")
    assert own.split() == ["2", "1"], (
        "the line of the pod's name, and that of cloud-init's template"
    )


def test_the_environment_has_the_address_of_the_pod(full: Full) -> None:
    """The network is made before the container, whose environment kubelet sets."""
    address = full.own.pod(POD)["status"]["podIP"]
    told = full.own.kubectl("exec", POD, "--", "cat", "/etc/cloud/environment")
    assert f"ADDRESS={address}" in told.splitlines()


def test_exec_runs_programs_of_the_guest_as_root(full: Full) -> None:
    own = full.own
    assert own.kubectl("exec", POD, "--", "id", "-un") == "root\n"
    assert own.kubectl("exec", "-i", POD, "--", "sha256sum", stdin="typed").startswith("2259e961")
    argv = own.words("exec", POD, "--", "sh", "-c", "echo told >&2; exit 5")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (5, "told")


def test_exec_has_a_terminal_of_the_guest(full: Full) -> None:
    with full.own.terminal("exec", "-it", POD, "--", "bash", "--norc") as user:
        user.type(b"tty; echo $TERM-$((6*7))\n")
        user.until(b"/dev/pts/")
        user.until(b"-42")
        # the shell itself would get an interrupt that comes before its command
        user.type(b"sh -c 'echo be$((1+1))gun; exec sleep 1000'\n")
        user.until(b"be2gun")
        user.type(b"\x03")  # the terminal drops what is typed before the interrupt's end
        user.until(b"# ")
        user.type(b"echo inter$((1+1))rupted\n")
        user.until(b"inter2rupted")
        user.type(b"exit 4\n")
        assert user.ended() == 4


def test_files_and_folders_are_copied_both_ways(full: Full, tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    (sent / "inner").mkdir(parents=True)
    (sent / "inner" / "bytes").write_bytes(bytes(range(256)) * 8192)
    (sent / "text").write_text("of the user\n")
    full.own.kubectl("cp", str(sent), f"{POD}:/srv/copied")
    full.own.kubectl("cp", f"{POD}:/srv/copied", str(tmp_path / "back"))
    for name in ("inner/bytes", "text"):
        assert (tmp_path / "back" / name).read_bytes() == (sent / name).read_bytes()


def test_a_port_and_the_console_are_those_of_the_guest(full: Full) -> None:
    argv = full.own.words("port-forward", POD, ":22")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as forwarding:
        try:
            assert forwarding.stdout is not None
            told = re.search(r"127\.0\.0\.1:(\d+)", forwarding.stdout.readline())
            assert told
            with socket.create_connection(("127.0.0.1", int(told[1])), timeout=60) as client:
                assert client.recv(64).startswith(b"SSH-2.0-OpenSSH")
        finally:
            forwarding.kill()
    full.own.logged(POD, f"GUEST-READY hostname={POD}".encode())
