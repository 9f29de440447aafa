"""docker-compose.yml as a new user runs it: a guest boots and survives replaced containers.

This runs if a Docker engine with its compose plugin answers. The services use the engine's
network and a node id of their own. BASE names another image than debian:bookworm-slim.
"""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
IMAGE = Path("/var/lib/virtbus/images/src/tiny.qcow2")
SERVICES = ("nats", "controller", "imaged", "netd", "nodeagent")
BUILD_S, UP_S, BOOT_S = 1500, 240, 120
PID = "for pid in $(cat /run/libvirt/qemu/vb-*.pid); do [ ! -d /proc/$pid ] || echo $pid; done"


@cache
def engine() -> str:
    """Return the reason why no engine can be used; empty if one can."""
    for command in (("docker", "info"), ("docker", "compose", "version")):
        try:
            done = subprocess.run(command, capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return done.stderr.decode(errors="replace").strip() or f"{command} failed"
    return ""


pytestmark = [pytest.mark.long, pytest.mark.timeout(BUILD_S + 900)]


class Compose:
    """The project of one test; its images carry `mark`, so another mark makes other images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(folder / "marks.yml"))
        self.mark("first")

    def mark(self, text: str) -> None:
        builds = {
            name: {"build": {"network": "host", "labels": {"virtbus.test": text}}}
            for name in (*SERVICES, "folders")
        }
        builds["libvirt"] = {"build": {"network": "host"}}
        content = yaml.safe_dump({"services": builds})
        (self.folder / "marks.yml").write_text(content, encoding="utf-8")

    def run(self, *arguments: str, timeout_s: float = 60, ok: bool = True) -> str:
        project = ("--project-directory", str(ROOT), "-p", "virtbus-test")
        kvm = "/dev/kvm" if Path("/dev/kvm").exists() else "/dev/null"
        environ = os.environ | {
            "VIRTBUS_STATE_DIR": str(self.folder / "state"),
            "VIRTBUS_RUN_DIR": str(self.folder / "run"),
            "VIRTBUS_NODE": "compose",
            "VIRTBUS_KVM": kvm,
        }
        done = subprocess.run(
            ("docker", "compose", *self._files, *project, *arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environ,
        )
        assert done.returncode == 0 or not ok, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def virtbus(self, *arguments: str, timeout_s: float = 60, ok: bool = True) -> str:
        return self.run("exec", "-T", "nats", "virtbus", *arguments, timeout_s=timeout_s, ok=ok)

    def containers(self) -> dict[str, dict[str, Any]]:
        lines = self.run("ps", "-a", "--format", "json").splitlines()
        return {one["Service"]: one for one in map(json.loads, lines)}

    def healthy(self) -> bool:
        found = self.containers()
        return all(found[name]["Health"] == "healthy" for name in (*SERVICES, "libvirt"))

    def qemu(self) -> int:
        """Return the process of the one guest; 0 if there is none."""
        return int(self.run("exec", "-T", "libvirt", "sh", "-c", PID).strip() or 0)


def until(holds: Callable[[], bool], within_s: float, what: str) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.5)


@pytest.fixture
def compose() -> Iterator[Compose]:
    if why := engine():
        pytest.skip(f"no Docker engine: {why}")
    folder = Path(tempfile.mkdtemp(prefix="virtbus-compose-", dir="/var/tmp"))
    folder.chmod(0o755)  # QEMU's user must be able to traverse it
    source = folder / "state" / "images" / "src"
    source.mkdir(parents=True)
    shutil.copy(IMAGE, source)
    one = Compose(folder)
    try:
        yield one
    finally:
        one.run("down", "-v", "--remove-orphans", timeout_s=120, ok=False)
        shutil.rmtree(folder)


def test_a_guest_boots_and_outlives_all_containers_but_libvirts(compose: Compose) -> None:
    compose.run("up", "-d", "--build", timeout_s=BUILD_S)
    until(compose.healthy, UP_S, "all containers are healthy")
    compose.virtbus("vm", "create", "web", "--image", "tiny", "--wait", "ready", timeout_s=BOOT_S)
    before, qemu = compose.containers(), compose.qemu()

    compose.mark(secrets.token_hex(4))
    compose.run("up", "-d", "--build", timeout_s=BUILD_S)
    until(compose.healthy, UP_S, "all containers are healthy again")
    after = compose.containers()
    assert {name for name in SERVICES if after[name]["ID"] == before[name]["ID"]} == set()
    assert after["libvirt"]["ID"] == before["libvirt"]["ID"]
    assert compose.qemu() == qemu
    shown = json.loads(compose.virtbus("vm", "get", "web", "-o", "json"))
    assert shown["state"] == "Running"

    report = json.loads(compose.virtbus("doctor", "-o", "json"))
    assert report["count"]["fail"] == 0
    assert {f["name"] for f in report["findings"] if f["level"] == "unknown"} >= {"libvirtd", "kvm"}
    compose.run("exec", "-T", "nats", "ssh", "-V")

    compose.run("restart", "libvirt", "nodeagent", timeout_s=120)
    state = ""
    while state != "Running":
        state = json.loads(compose.virtbus("vm", "get", "web", "-o", "json"))["state"]
    assert compose.qemu() != qemu, "Running, and the guest is dead"

    compose.virtbus("vm", "delete", "web", "--grace", "0", timeout_s=BOOT_S)
    assert list((compose.folder / "state" / "disks").iterdir()) == []


def test_a_container_reads_no_credentials_but_its_own(compose: Compose) -> None:
    compose.run("up", "-d", "--build", timeout_s=BUILD_S)
    until(compose.healthy, UP_S, "all containers are healthy")
    look = "cat /run/virtbus/*.creds /var/lib/virtbus/nats/* /var/lib/virtbus/bus-passwords.json"
    for name in SERVICES[1:]:
        seen = compose.run("exec", "-T", name, "sh", "-c", f"{look} 2>/dev/null", ok=False)
        assert seen == "", name
    for name in ("controller", "imaged"):
        assert compose.run("exec", "-T", name, "id", "-u").strip() != "0"


def test_a_bus_that_is_stopped_is_not_healthy(compose: Compose) -> None:
    compose.run("up", "-d", "--build", timeout_s=BUILD_S)
    until(compose.healthy, UP_S, "all containers are healthy")
    stop = "kill -STOP $(cat /run/virtbus/nats-server.pid)"
    compose.run("exec", "-T", "nats", "sh", "-c", stop)
    until(lambda: compose.containers()["nats"]["Health"] == "unhealthy", 60, "nats is unhealthy")
