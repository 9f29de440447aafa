"""A disk leaves the platform as one file, byte for byte, while its VM cannot start."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from tests.e2e.platform import Platform, Refused, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

WRITE = """#!/bin/sh
echo exported-by-name | dd of=/dev/vdb conv=fsync 2>/dev/null
echo ALL-WRITTEN > /dev/ttyS0
"""


def _latest(platform: Platform) -> str:
    items = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    return str(items[-1]["id"])


def test_a_disk_and_a_volume_are_exported_and_downloaded(
    platform: Platform, tmp_path: Path
) -> None:
    user_data = tmp_path / "user-data"
    user_data.write_text(WRITE)
    platform.cli("volume", "create", "data-1", "--size", "64MiB")
    use = ("--image", "tiny", "--memory", "128MiB", "--volume", "data-1")
    platform.create("web", *use, "--user-data", str(user_data), wait="ready")
    until(lambda: "ALL-WRITTEN" in platform.console_log("web"), "the guest wrote")
    with pytest.raises(Refused) as refused:
        platform.cli("vm", "export", "web", "-o", "json")
    assert refused.value.error["reason"] == "vm_runs"
    platform.cli("vm", "stop", "web", "--wait")

    root = tmp_path / "root.qcow2"
    told = json.loads(platform.cli("vm", "export", "web", "-f", str(root), "-o", "json"))
    assert told["digest"] == f"sha256:{hashlib.sha256(root.read_bytes()).hexdigest()}"
    uid = json.loads(platform.cli("vm", "get", "web", "-o", "json"))["uid"]
    disk = platform.state_dir / "disks" / uid / "root.qcow2"
    subprocess.run(["qemu-img", "check", "-q", str(root)], check=True)
    subprocess.run(["qemu-img", "compare", "-q", str(disk), str(root)], check=True)

    data = tmp_path / "data.raw"
    platform.cli("vm", "export", "web", "--disk", "data-1", "--format", "raw", "-f", str(data))
    assert data.read_bytes().startswith(b"exported-by-name\n")
    platform.cli("vm", "start", "web", "--wait")
    platform.delete("web")
    again = tmp_path / "again.raw"
    platform.cli("volume", "export", "data-1", "--format", "raw", "-f", str(again))
    assert again.read_bytes() == data.read_bytes()

    link = platform.cli("export", "link", _latest(platform), "--expires", "10m").strip()
    fetched = tmp_path / "fetched.raw"
    fetched.write_bytes(data.read_bytes()[:1000])  # a download that broke
    subprocess.run(["curl", "-sSf", "-C", "-", "-o", str(fetched), link], check=True)
    assert fetched.read_bytes() == data.read_bytes()

    items = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    assert [item["phase"] for item in items] == ["Succeeded"] * 3
    platform.cli("operation", "delete", *(item["id"] for item in items))
    exports = platform.state_dir / "disks" / "exports"
    until(lambda: not exports.exists(), "the files are removed")
    platform.cli("volume", "delete", "data-1")
    platform.nothing_left()
