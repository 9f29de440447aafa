"""Boots the image with plain QEMU: its console, its network, its power button."""

from __future__ import annotations

import base64
import gzip
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from images.tests.plain_qemu import Guest, disk_seed, overlay, write_seed

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


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image named by VIRTBUS_TINY, or a fresh one (instant if the cache has it)."""
    if given := os.environ.get("VIRTBUS_TINY"):
        return Path(given)
    path = tmp_path_factory.mktemp("image") / "tiny.qcow2"
    subprocess.run([Path(__file__).parents[1] / "build", path], check=True, timeout=300)
    return path


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
    # The second NIC has a cable but no peer.
    nics = (
        "-nic",
        f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{port}-:22",
        "-nic",
        "hubport,hubid=7,model=virtio-net-pci",
    )

    with Guest(tmp_path, disk, *disk_seed(seed), *nics) as guest:
        guest.wait_for("GUEST-NICS ", BOOT_SECONDS)
        console = guest.wait_for("login:", BOOT_SECONDS)
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
        pytest.param("pc", "qemu64", 256, ide_cdrom, marks=pytest.mark.long),
        pytest.param("pc", "max", 128, disk_seed, marks=pytest.mark.long),
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
        guest.wait_for("SCRIPT-RAN", BOOT_SECONDS)


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
