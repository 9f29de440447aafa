"""`virtbus cri install` sets up a Kubernetes node, and `uninstall` undoes it."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from virtbus.cli.__main__ import main

CONTAINERD = "run/containerd/containerd.sock"
PROXY = "run/virtbus/criproxy.sock"


class Host:
    """A folder that is the host's root, with sockets, and a systemctl that notes its calls."""

    def __init__(self, root: Path, sockets: ExitStack) -> None:
        self.root = root
        self._sockets = sockets
        self.called = root / "called"

    def listen(self, path: str) -> None:
        """Accept connections on a socket below the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        sock = self._sockets.enter_context(socket.socket(socket.AF_UNIX))
        sock.bind(str(place))
        sock.listen()

    def write(self, path: str, text: str = "") -> None:
        """Write a file below the root."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def files(self) -> set[str]:
        """Return the files of the host, except those of kubelet and the test."""
        found = {
            str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()
        }
        return found - {"called", "bin/systemctl"}

    def calls(self) -> list[str]:
        """Return the calls of systemctl so far, and forget them."""
        lines = self.called.read_text().splitlines() if self.called.exists() else []
        self.called.unlink(missing_ok=True)
        return lines


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with ExitStack() as sockets:
        host = Host(tmp_path, sockets)
        host.write("bin/systemctl", f'#!/bin/sh\necho "$*" >>{host.called}\n')
        (tmp_path / "bin/systemctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        for unit in ("virtbus-cri", "virtbus-criproxy"):
            host.write(f"etc/systemd/system/{unit}.service")
        (tmp_path / "run/systemd/system").mkdir(parents=True)
        for path in (CONTAINERD, PROXY, "run/virtbus/cri.sock"):
            host.listen(path)
        yield host


def call(host: Host, *argv: str, code: int = 0) -> None:
    assert main(["cri", *argv, "--root", str(host.root), "-o", "json"]) == code


def test_install_starts_both_services_and_names_the_next_steps(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.write("var/lib/kubelet/config.yaml", "containerRuntimeEndpoint: unix:///x\n")
    call(host, "install")
    answer = json.loads(capsys.readouterr().out)
    assert host.calls() == ["daemon-reload", "enable --now virtbus-cri virtbus-criproxy"]
    made, policy, binding = yaml.safe_load_all(
        (host.root / "etc/virtbus/runtimeclass.yaml").read_text()
    )
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert (made["kind"], made["metadata"]["name"], made["handler"]) == (
        "RuntimeClass",
        "virtbus",
        "virtbus",
    )
    assert answer["next"] == [
        f"once for the cluster: kubectl apply -f {host.root}/etc/virtbus/runtimeclass.yaml",
        "for this node: kubectl label node NODE virtbus.io/vm-pods=true",
        f"in {host.root}/var/lib/kubelet/config.yaml: set kubelet's runtime endpoint to "
        "unix:///run/virtbus/criproxy.sock",
        "systemctl restart kubelet",
    ]


def test_install_waits_for_both_services(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    (host.root / "run/virtbus/cri.sock").unlink()
    late = threading.Timer(0.5, host.listen, ("run/virtbus/cri.sock",))
    late.start()
    try:
        call(host, "install")
    finally:
        late.join()
    assert not [step for step in json.loads(capsys.readouterr().out)["next"] if "answer" in step]


def test_install_takes_the_sockets_from_the_settings_of_the_services(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    for socket_file in ("run/virtbus/cri.sock", PROXY):
        (host.root / socket_file).unlink()
    host.write("etc/virtbus/cri.toml", 'listen = "/run/own.sock"\n')
    host.write("etc/virtbus/criproxy.toml", 'run_dir = "/run/own"\n')
    host.listen("run/own.sock")
    host.listen("run/own/criproxy.sock")
    call(host, "install")
    answer = json.loads(capsys.readouterr().out)
    assert answer["socket"] == "/run/own/criproxy.sock"
    assert not [step for step in answer["next"] if "answer" in step]
    assert any("unix:///run/own/criproxy.sock" in step for step in answer["next"])


DRIVER = "usr/libexec/kubernetes/kubelet-plugins/volume/exec/virtlet~flexvolume_driver"


def driven(host: Host, *argv: str) -> tuple[int, Any]:
    """Run the installed driver of flexvolumes as kubelet does; return its code and answer."""
    done = subprocess.run(
        [host.root / DRIVER / "flexvolume_driver", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return done.returncode, json.loads(done.stdout)


def test_the_driver_of_flexvolumes_answers_as_kubelet_needs_it(host: Host) -> None:
    call(host, "install")
    assert driven(host, "init") == (
        0,
        {"status": "Success", "capabilities": {"attach": False}},
    )
    assert driven(host, "attach", "{}") == (1, {"status": "Not supported"})
    assert driven(host) == (1, {"status": "Not supported"})
    assert driven(host, "mount", "/x")[1]["status"] == "Failure"
    assert driven(host, "unmount")[1]["status"] == "Failure"


@pytest.mark.integration
def test_the_driver_keeps_the_options_in_memory_until_the_unmount(host: Host) -> None:
    call(host, "install")
    folder, options = host.root / "a volume", '{"type": "qcow2", "secret": "x y"}'
    try:
        for _ in range(2):
            assert driven(host, "mount", str(folder), options) == (0, {"status": "Success"})
        assert (folder / "virtlet-flexvolume.json").read_text() == options
        assert folder.is_mount()
    finally:
        for _ in range(2):
            assert driven(host, "unmount", str(folder)) == (0, {"status": "Success"})
    assert list(folder.iterdir()) == []


def test_a_host_whose_plugins_cannot_be_written_has_no_flexvolumes(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.write("usr", "a file, where a folder would be read-only")
    call(host, "install")
    steps = json.loads(capsys.readouterr().out)["next"]
    assert any("no flexvolumes" in step for step in steps)


def test_a_repeated_install_changes_nothing(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    call(host, "install")
    before = host.files()
    capsys.readouterr()
    call(host, "install")
    assert json.loads(capsys.readouterr().out)["changed"] == []
    assert host.files() == before


def test_a_repeated_install_makes_the_driver_executable(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    call(host, "install")
    driver = host.root / DRIVER / "flexvolume_driver"
    driver.chmod(0o644)
    capsys.readouterr()
    call(host, "install")
    assert json.loads(capsys.readouterr().out)["changed"] == [str(driver)]
    assert driven(host, "init")[0] == 0


def test_an_install_that_is_killed_leaves_no_driver_that_cannot_run(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.files()

    def killed(path: Path, mode: int) -> None:
        if "flexvolume" in path.name:
            raise KeyboardInterrupt
        os.chmod(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", killed)
        call(host, "install", code=130)
    assert not (host.root / DRIVER / "flexvolume_driver").exists()
    call(host, "uninstall")
    assert host.files() == before
    call(host, "install")
    assert driven(host, "init")[0] == 0


def test_uninstall_leaves_the_host_as_it_was(host: Host) -> None:
    before = host.files()
    host.listen("run/other.sock")
    call(host, "install", "--container-runtime", "/run/other.sock")
    drop_in = "etc/systemd/system/virtbus-criproxy.service.d/container-runtime.conf"
    assert 'VIRTBUS_CONTAINER_RUNTIME=/run/other.sock"' in (host.root / drop_in).read_text()
    host.write("var/lib/virtbus/criproxy/vms/ListContainers", "kept")
    host.calls()
    call(host, "uninstall")
    assert host.calls() == ["disable --now virtbus-cri virtbus-criproxy", "daemon-reload"]
    assert host.files() == before
    assert not (host.root / drop_in).parent.exists()
    call(host, "uninstall")


def test_an_uninstall_stops_the_unit_that_is_there(host: Host) -> None:
    call(host, "install")
    (host.root / "etc/systemd/system/virtbus-cri.service").unlink()
    host.calls()
    call(host, "uninstall")
    assert host.calls() == ["disable --now virtbus-criproxy", "daemon-reload"]


def test_an_install_with_the_default_runtime_removes_the_drop_in(host: Host) -> None:
    host.listen("run/other.sock")
    call(host, "install", "--container-runtime", "/run/other.sock")
    call(host, "install")
    assert "restart virtbus-criproxy" in host.calls()[-1]
    assert not [path for path in host.files() if path.endswith("container-runtime.conf")]


def test_all_hindrances_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cri", "install", "--root", str(tmp_path), "-o", "json"]) == 1
    told: dict[str, Any] = json.loads(capsys.readouterr().err)
    assert [one["hint"] for one in told["error"]["details"]] == [
        "run deploy/install",
        "start it, or name its socket with --container-runtime",
    ]


def test_uninstall_is_refused_while_pods_or_kubelet_need_it(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.write("var/lib/virtbus/cri/pods/a.json", "{}")
    host.write("var/lib/kubelet/kubeadm-flags.env", "--x=unix:///run/virtbus/criproxy.sock")
    host.write("proc/7/cmdline", "/usr/bin/kubelet\0--e=unix:///run/virtbus/criproxy.sock\0")
    call(host, "uninstall", code=1)
    told = json.loads(capsys.readouterr().err)["error"]["details"]
    assert told[0]["message"] == "1 VM pods are left on this node"
    assert "kubeadm-flags.env, the running kubelet (pid 7)" in told[1]["message"]
    assert host.calls() == []


def test_without_systemd_the_programs_are_named(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    (host.root / "run/systemd/system").rmdir()
    call(host, "install")
    steps = json.loads(capsys.readouterr().out)["next"]
    assert steps[0] == "no systemd runs here; run these programs: virtbus-cri virtbus-criproxy"
    assert host.calls() == []
