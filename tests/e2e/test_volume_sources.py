"""Disks enter the platform as volumes: from files, URLs and volumes, and guests boot from them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.e2e.platform import Platform, Refused, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

READ = """#!/bin/sh
echo "TOLD $(head -n 1 /dev/vdb) ALL-TOLD" > /dev/ttyS0
"""
FILES = {"disk.qcow2", "record.json"}


def volume(platform: Platform, *words: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(platform.cli("volume", *words, "-o", "json"))
    return found


def disk_of(platform: Platform, name: str) -> Path:
    (folder,) = (platform.state_dir / "disks" / "volumes").glob(f"default.{name}.*")
    return folder / "disk.qcow2"


def test_a_file_is_imported_cloned_exported_and_imported_again(
    platform: Platform, tmp_path: Path
) -> None:
    raw = tmp_path / "data.raw"
    raw.write_bytes(b"imported-by-name\n" + bytes(8 * 1024**2 - 17))
    vmdk = tmp_path / "data.vmdk"
    convert = ["qemu-img", "convert", "-f", "raw", "-O", "vmdk", str(raw), str(vmdk)]
    subprocess.run(convert, check=True)
    one = volume(platform, "create", "one", "--from-file", str(vmdk))
    assert (one["state"], one["spec"]["size"]) == ("Bound", 8 * 1024**2)  # type: ignore[index]
    subprocess.run(
        ["qemu-img", "compare", "-q", str(raw), str(disk_of(platform, "one"))], check=True
    )
    names = [name for image in _images(platform) for name in image["names"]]
    assert not [name for name in names if name.startswith("volumes/")]

    script = tmp_path / "user-data"
    script.write_text(READ)
    use = ("--image", "tiny", "--memory", "128MiB", "--user-data", str(script))
    platform.create("web", *use, "--volume", "one", wait="ready")
    until(lambda: "TOLD imported-by-name ALL-TOLD" in platform.console_log("web"), "the guest read")
    with pytest.raises(Refused) as refused:
        platform.cli("volume", "create", "two", "--from-volume", "one", "-o", "json")
    assert refused.value.error["reason"] == "volume_in_use"
    platform.cli("vm", "stop", "web", "--wait")
    two = volume(platform, "create", "two", "--from-volume", "one", "--size", "32MiB")
    assert two["state"] == "Bound"
    platform.delete("web")
    platform.cli("volume", "delete", "one")

    again = tmp_path / "again.raw.gz"
    platform.cli("volume", "export", "two", "--format", "raw.gz", "-f", str(again))
    volume(platform, "create", "three", "--from-file", str(again), "--size", "64MiB")
    subprocess.run(
        [
            "qemu-img",
            "compare",
            "-q",
            str(disk_of(platform, "two")),
            str(disk_of(platform, "three")),
        ],
        check=True,
    )
    for item in json.loads(platform.cli("operation", "list", "-o", "json"))["items"]:
        platform.cli("operation", "delete", item["id"])
    platform.cli("volume", "delete", "two", "three")
    platform.nothing_left()


def test_a_vm_waits_for_the_copy_of_its_root_disk(platform: Platform, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"QFI\xfb" + bytes(60))
    with pytest.raises(Refused) as refused:
        platform.cli("volume", "create", "root-1", "--from-url", f"file://{broken}", "-o", "json")
    assert refused.value.error["reason"] == "fill_failed"
    assert volume(platform, "get", "root-1")["state"] == "FillFailed"
    file = tmp_path / "vm.json"
    root = {"name": "root", "volume": {"name": "root-1"}}
    memory = {"memory": {"guest": "128MiB"}}
    file.write_text(json.dumps({"spec": {"domain": memory, "volumes": [root]}}), encoding="utf-8")
    platform.create("boots", "-f", str(file), wait="")
    until(
        lambda: "no content yet" in json.dumps(platform.get("boots")), "the VM says what it lacks"
    )
    platform.delete("boots")
    platform.cli("volume", "delete", "root-1")
    platform.cli("volume", "create", "root-1", "--from-image", "tiny", "--full", "--no-wait")
    platform.create("boots", "-f", str(file), wait="ready")
    platform.cli("vm", "stop", "boots", "--wait")
    assert volume(platform, "create", "root-2", "--from-vm", "boots")["state"] == "Bound"
    compare = ["qemu-img", "compare", "-q"]
    disks = [str(disk_of(platform, name)) for name in ("root-1", "root-2")]
    subprocess.run([*compare, *disks], check=True)
    platform.delete("boots")
    image = subprocess.check_output(["qemu-img", "info", str(disk_of(platform, "root-1"))])
    assert b"backing" not in image
    for item in json.loads(platform.cli("operation", "list", "-o", "json"))["items"]:
        platform.cli("operation", "delete", item["id"])
    platform.cli("volume", "delete", "root-1", "root-2")
    platform.nothing_left()


def test_a_copy_survives_kills_of_all_services(patient: Platform, tmp_path: Path) -> None:
    raw = tmp_path / "big.raw"
    with raw.open("wb") as file:
        for _ in range(192):
            file.write(os.urandom(1024**2))
    patient.cli("image", "upload", str(raw), "--name", "big")
    patient.cli("volume", "create", "big", "--from-image", "big", "--full", "--no-wait")
    for service in ("imaged", "nodeagent", "controller", "imaged"):
        patient.wait_back(service, patient.kill(service))
    until(lambda: volume(patient, "get", "big")["state"] == "Bound", "the volume is filled")
    disk = disk_of(patient, "big")
    subprocess.run(["qemu-img", "check", "-q", str(disk)], check=True)
    compare = ["qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", str(raw), str(disk)]
    subprocess.run(compare, check=True)
    assert {path.name for path in disk.parent.iterdir()} <= {*FILES, "disk.json"}
    for item in json.loads(patient.cli("operation", "list", "-o", "json"))["items"]:
        patient.cli("operation", "delete", item["id"])
    patient.cli("volume", "delete", "big")
    patient.cli("image", "delete", "big")
    patient.nothing_left()


def _images(platform: Platform) -> list[dict[str, list[str]]]:
    found: list[dict[str, list[str]]] = json.loads(platform.cli("image", "list", "-o", "json"))[
        "items"
    ]
    return found
