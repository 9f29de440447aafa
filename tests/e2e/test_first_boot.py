"""The full guest applies every kind of first-boot data, and nothing of it twice."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, until
from tests.e2e.test_debian import BOOT_S, debian_image

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]

GREETING = """it's "here" for $HOME `id` \\ größe"""
IGNITION = '{"ignition": {"version": "3.4.0"}}'
CONFIG = """#cloud-config
users: [default, {name: admin, shell: /bin/bash}]
fs_setup: [{device: /dev/disk/by-id/virtio-data, filesystem: ext4}]
write_files: [{path: /etc/theirs, content: theirs}]
runcmd: ['echo first >> /root/ran']
"""
MORE = "#cloud-config\nruncmd: ['echo second >> /root/ran']\n"
SCRIPT = "#!/bin/sh\necho script >> /root/ran-by-script\n"
MAC = "02:00:00:00:0b:01"
NETWORK = f"""version: 2
ethernets: {{a: {{match: {{macaddress: "{MAC}"}}, set-name: lan0, dhcp4: true}}}}
"""
SEED: dict[str, Any] = {
    "user_data": SCRIPT,
    "user_data_parts": [{"data": CONFIG}, {"data": MORE}],
    "vendor_data": "#cloud-config\ntimezone: Etc/GMT+3\nruncmd: ['echo vendor >> /root/ran']\n",
    "environment": {"GREETING": GREETING, "PLAIN": "a-b"},
    "write_files": [
        {
            "path": "/etc/app.key",
            "content_base64": "AP8B",
            "mode": "0640",
            "owner": "admin:admin",
        }
    ],
    "mounts": [{"volume": "data", "path": "/srv/data", "filesystem": "ext4"}],
    "network_data": NETWORK,
}
SPEC: dict[str, Any] = {
    "domain": {
        "memory": {"guest": "512MiB"},
        "devices": {"interfaces": [{"name": "default", "mac_address": MAC}]},
    },
    "volumes": [
        {"name": "root", "image": {"ref": "debian", "size": "3GiB"}},
        {"name": "data", "empty_disk": {"capacity": "64MiB"}},
        {"name": "seed", "cloud_init_no_cloud": SEED},
    ],
    "networks": [{"name": "default"}],
    "ignition": {"config": IGNITION},
}


def booted(platform: Platform) -> Json:
    """Return the VM once its guest has reported that it is ready."""
    until(
        lambda: "GUEST-NICS " in platform.console_log("full"),
        lambda: platform.console_log("full")[-4000:],
        within_s=BOOT_S,
    )
    return platform.get("full")


def test_a_full_guest_applies_all_first_boot_data_once(platform: Platform, tmp_path: Path) -> None:
    shutil.copy(debian_image(), platform.state_dir / "images/src/debian.qcow2")
    login = Login(tmp_path, user="debian")
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"spec": SPEC}))
    platform.create("full", "-f", str(file), "--ssh-key", login.public_key)
    guest = booted(platform)

    assert login(guest, "cloud-init status --wait").split() == ["status:", "done"]
    assert login(guest, "sudo cat /root/ran /root/ran-by-script").split() == [
        *("first", "second", "script"),
    ]
    assert login(guest, "cat /etc/timezone /etc/theirs; echo; id -un admin").split() == [
        *("Etc/GMT+3", "theirs", "admin"),
    ]
    assert login(guest, "stat -c %U:%G:%a /etc/app.key; sudo od -An -tx1 /etc/app.key").split() == [
        *("admin:admin:640", "00", "ff", "01"),
    ]
    assert login(guest, '. /etc/cloud/environment; printf %s "$GREETING"') == GREETING
    by_systemd = "sudo systemd-run -q --pipe -p EnvironmentFile=/etc/cloud/environment"
    assert login(guest, f"{by_systemd} printenv GREETING PLAIN") == f"{GREETING}\na-b\n"
    assert login(guest, "cat /sys/class/net/lan0/address").strip() == MAC
    assert login(guest, "findmnt -no SOURCE,FSTYPE /srv/data").split() == ["/dev/vdb", "ext4"]
    assert login(guest, "grep -c ^/dev/disk/by-id/virtio-data /etc/fstab").strip() == "1"
    shown = "/sys/firmware/qemu_fw_cfg/by_name/opt/com.coreos/config/raw"
    assert login(guest, f"sudo modprobe qemu_fw_cfg; sudo cat {shown}") == IGNITION
    assert login(guest, "sudo grep WARNING /var/log/cloud-init.log || :") == ""

    login(guest, "sudo sh -c 'echo kept > /srv/data/file'; sync")
    identity = "cloud-init query instance_id; sudo md5sum /etc/ssh/ssh_host_ed25519_key"
    before = login(guest, identity)
    platform.cli("vm", "stop", "full", "--grace", "600", "--timeout", "600", timeout_s=700)
    platform.cli("vm", "start", "full")
    guest = booted(platform)
    assert login(guest, identity) == before, "the same instance"
    assert login(guest, "cat /srv/data/file").strip() == "kept"
    assert login(guest, "sudo cat /root/ran /root/ran-by-script").split() == [
        *("first", "second", "script"),
    ]
