"""Boots the image with plain QEMU: its console, its network, its power button."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pycdlib
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BOOT_SECONDS = 60  # 3 s on an idle machine; a busy one may take much longer
META = "instance-id: i-1\nlocal-hostname: probe\n"
PACKED = base64.b64encode(gzip.compress(b"packed\n")).decode()
USER = f"""\
#cloud-config
hostname: probe-1           # wins over the meta-data
ssh_authorized_keys: [KEY]
users:
  - default
  - name: root
    ssh_authorized_keys:
      - ssh-ed25519 AAAAsecond of root
write_files:
- path: /etc/made/by seed
  permissions: '0640'
  content: |
    first: line

      indented
- {{path: /root/packed, encoding: gz+b64, content: {PACKED}}}
- path: /root/twice
  append: true
  content: "one\\n"
- path: /root/twice
  append: true
  encoding: b64
  content: {base64.b64encode(b"two").decode()}
runcmd:
- echo "string=$(hostname)" >>/root/ran
- [sh, -c, 'echo "list: $0" >>/root/ran', "it's"]
"""


def write_seed(path: Path, parts: dict[str, str]) -> Path:
    """Write a NoCloud seed: an ISO labelled `cidata` holding the given files."""
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident="cidata", rock_ridge="1.09", joliet=3)
    for number, (name, text) in enumerate(parts.items()):
        data = text.encode()
        iso.add_fp(
            io.BytesIO(data), len(data), f"/PART{number}.;1", rr_name=name, joliet_path=f"/{name}"
        )
    iso.write(str(path))
    iso.close()
    return path


def overlay(image: Path, path: Path, size: str = "1G") -> Path:
    """Make a writable disk over the image, larger than it, as the product does."""
    command = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        str(image),
        str(path),
        size,
    ]
    subprocess.run(command, check=True, timeout=30)
    return path


class Guest:
    """A QEMU process with its console and QMP, gone when the `with` block is left."""

    def __init__(
        self,
        folder: Path,
        disk: Path,
        *extra: str,
        machine: str = "q35",
        cpu: str = "qemu64",
        mib: int = 128,
    ) -> None:
        self.output = b""
        self._qmp_path = folder / "qmp"
        self._qmp_path.unlink(missing_ok=True)
        # fmt: off
        self._command = [
            "qemu-system-x86_64", "-machine", f"{machine},accel=tcg", "-cpu", cpu,
            "-m", str(mib), "-smp", "1",
            "-nodefaults", "-display", "none", "-serial", "stdio",
            "-qmp", f"unix:{self._qmp_path},server=on,wait=off",
            "-drive", f"file={disk},if=virtio,format=qcow2", "-device", "virtio-rng-pci", *extra,
        ]
        # fmt: on

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def wait_for(self, text: str, seconds: float, since: int = 0) -> str:
        """Return the console's output from byte `since` once it holds `text`."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while text.encode() not in self.output[since:]:
            left = deadline - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(left, 0))[0]
            chunk = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise AssertionError(
                    f"no {text!r} on the console within {seconds} s:\n"
                    + self.output.decode(errors="replace")
                )
            self.output += chunk
        return self.output[since:].decode(errors="replace")

    def run(self, command: str, seconds: float = 20) -> str:
        """Run a command in the shell on the console and return what it printed."""
        assert self._process.stdin is not None
        self.wait_for("login:", seconds)
        since = len(self.output)
        # The quotes keep the echo of the typed line from looking like the answer.
        self._process.stdin.write(f"echo 'BEG''IN'; {command}; echo 'EN''D'\n".encode())
        self._process.stdin.flush()
        answer = self.wait_for("END\r\n", seconds, since)
        return answer.split("BEGIN\r\n", 1)[1].rsplit("END\r\n", 1)[0].replace("\r\n", "\n")

    def power_button(self) -> None:
        """Press it."""
        with socket.socket(socket.AF_UNIX) as qmp:
            qmp.settimeout(10)
            qmp.connect(str(self._qmp_path))
            answers = qmp.makefile("r")
            answers.readline()
            for name in ("qmp_capabilities", "system_powerdown"):
                qmp.sendall(json.dumps({"execute": name}).encode())
                while "return" not in json.loads(answers.readline()):
                    pass

    def wait_off(self, seconds: float) -> int:
        """Wait for the guest to switch itself off; return QEMU's exit code."""
        return self._process.wait(timeout=seconds)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image named by VIRTBUS_TINY, or a fresh one (instant when the cache holds it)."""
    if given := os.environ.get("VIRTBUS_TINY"):
        return Path(given)
    path = tmp_path_factory.mktemp("image") / "tiny.qcow2"
    subprocess.run([Path(__file__).parents[1] / "build", path], check=True, timeout=300)
    return path


def disk_seed(path: Path) -> tuple[str, ...]:
    return ("-drive", f"file={path},if=virtio,format=raw,readonly=on")


def scsi_cdrom(path: Path) -> tuple[str, ...]:
    return (
        "-device",
        "virtio-scsi-pci",
        "-drive",
        f"file={path},if=none,id=cd,format=raw,readonly=on",
        "-device",
        "scsi-cd,drive=cd",
    )


def ide_cdrom(path: Path) -> tuple[str, ...]:
    return ("-drive", f"file={path},if=ide,media=cdrom,format=raw,readonly=on")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_whole_life(image: Path, tmp_path: Path) -> None:
    key, port = tmp_path / "key", free_port()
    made = subprocess.run(
        ["dropbearkey", "-t", "ed25519", "-f", key],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    public = next(line for line in made.stdout.splitlines() if line.startswith("ssh-ed25519"))
    seed = write_seed(
        tmp_path / "seed.iso", {"meta-data": META, "user-data": USER.replace("KEY", public)}
    )
    disk = overlay(image, tmp_path / "disk.qcow2")
    # The second NIC has a cable but nobody at its other end.
    nics = (
        "-nic",
        f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{port}-:22",
        "-nic",
        "hubport,hubid=7,model=virtio-net-pci",
    )

    with Guest(tmp_path, disk, *disk_seed(seed), *nics) as guest:
        guest.wait_for("GUEST-NICS ", BOOT_SECONDS)
        console = guest.wait_for("login:", 10)
        assert re.findall(r"^GUEST-READY .*", console, re.MULTILINE) == [
            "GUEST-READY hostname=probe-1 ip=10.0.2.15\r"
        ]
        assert re.search(
            r"^GUEST-NICS eth0=52:54:00:[0-9a-f:]{8}/10\.0\.2\.15 eth1=[0-9a-f:]{17}/none\r$",
            console,
            re.MULTILINE,
        )

        assert guest.run("hostname") == "probe-1\n"
        assert (
            guest.run("cat /root/.ssh/authorized_keys")
            == f"{public}\nssh-ed25519 AAAAsecond of root\n"
        )
        assert guest.run("cat '/etc/made/by seed'") == "first: line\n\n  indented\n"
        assert guest.run("stat -c '%a %U:%G' '/etc/made/by seed'") == "640 root:root\n"
        assert guest.run("cat /root/packed /root/twice; echo") == "packed\none\ntwo\n"
        ran = "string=probe-1\nlist: it's\n"
        assert (
            guest.run(
                "until grep -q 'runcmd ended' /var/log/seed.log; do sleep 1; done; cat /root/ran"
            )
            == ran
        )
        assert int(guest.run("df -m / | awk 'END { print $2 }'")) > 800, (
            "the root did not grow with the disk"
        )

        ssh = [
            "dbclient",
            "-y",
            "-y",
            "-T",
            "-i",
            str(key),
            "-p",
            str(port),
            "root@127.0.0.1",
            "hostname",
        ]
        login = subprocess.run(
            ssh,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        assert login.stdout == "probe-1\n", login.stderr
        guest.power_button()
        assert guest.wait_off(30) == 0

    with Guest(tmp_path, disk, *disk_seed(seed), *nics) as guest:
        guest.wait_for("GUEST-READY hostname=probe-1 ip=10.0.2.15", BOOT_SECONDS)
        assert guest.run("usleep 500000; cat /root/ran") == ran, (
            "runcmd ran again for the same instance"
        )


@pytest.mark.parametrize(
    ("machine", "cpu", "mib", "attach"),
    [
        ("q35", "max", 128, scsi_cdrom),
        ("pc", "qemu64", 256, ide_cdrom),
        ("pc", "max", 128, disk_seed),
    ],
)
def test_other_machines(
    image: Path,
    tmp_path: Path,
    machine: str,
    cpu: str,
    mib: int,
    attach: Callable[[Path], tuple[str, ...]],
) -> None:
    seed = write_seed(
        tmp_path / "seed.iso",
        {"meta-data": META, "user-data": "#!/bin/sh\necho SCRIPT-RAN >/dev/console\n"},
    )
    disk = overlay(image, tmp_path / "disk.qcow2")
    with Guest(
        tmp_path,
        disk,
        *attach(seed),
        "-nic",
        "user,model=virtio-net-pci",
        machine=machine,
        cpu=cpu,
        mib=mib,
    ) as guest:
        guest.wait_for("GUEST-READY hostname=probe ip=10.0.2.15\r\n", BOOT_SECONDS)
        guest.wait_for("SCRIPT-RAN", 10)


def test_without_seed_and_network(image: Path, tmp_path: Path) -> None:
    disk = overlay(image, tmp_path / "disk.qcow2")
    with Guest(tmp_path, disk, "-nic", "hubport,hubid=7,model=virtio-net-pci") as guest:
        guest.wait_for("GUEST-READY hostname=tiny ip=none\r\n", BOOT_SECONDS)
        guest.power_button()
        assert guest.wait_off(30) == 0


def test_static_addresses(image: Path, tmp_path: Path) -> None:
    network = """\
version: 2
ethernets:
  nic0:
    match: {macaddress: "52:54:00:AB:00:01"}
    addresses: [10.0.2.77/24]
    gateway4: 10.0.2.2
    nameservers: {addresses: [10.0.2.3], search: [example.org]}
"""
    seed = write_seed(tmp_path / "seed.iso", {"meta-data": META, "network-config": network})
    disk = overlay(image, tmp_path / "disk.qcow2")
    with Guest(
        tmp_path, disk, *disk_seed(seed), "-nic", "user,model=virtio-net-pci,mac=52:54:00:ab:00:01"
    ) as guest:
        guest.wait_for("GUEST-READY hostname=probe ip=10.0.2.77\r\n", BOOT_SECONDS)
        assert guest.run("cat /etc/resolv.conf") == "nameserver 10.0.2.3\nsearch example.org\n"
        assert "default via 10.0.2.2 dev eth0" in guest.run("ip route")
