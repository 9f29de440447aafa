"""A VM with a disk on each bus, and tuned disks, starts on the whole platform."""

import json
from pathlib import Path
from typing import Any

import pycdlib
import pytest
from tests.e2e import host
from tests.e2e.platform import Json, Platform, Refused, until

from virtbus.schemas.disk import DiskBus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_a_vm_with_a_disk_on_each_bus_starts_with_its_properties(
    platform: Platform, tmp_path: Path
) -> None:
    disks: list[dict[str, Any]] = [
        *({"name": f"on-{bus}", "bus": bus} for bus in DiskBus),
        {"name": "tuned", "cache": "none", "io": "native", "limits": {"iops": 5000}},
        {"name": "cd", "bus": "sata", "device": "cdrom"},
        {"name": "drive", "bus": "sata", "device": "cdrom"},
    ]
    volumes = [{"name": disk["name"], "empty_disk": {"capacity": "8MiB"}} for disk in disks[:-1]]
    root = {"name": "root", "image": {"ref": "tiny"}}
    spec = {
        "domain": {"io_threads": {"policy": "shared"}, "devices": {"disks": disks}},
        "volumes": [root, *volumes],
    }
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"spec": spec}))
    view = platform.create("disks", "-f", str(file))
    _limits_and_media_change_while_it_runs(platform, view)
    platform.delete("disks")

    disks[0] |= {"io": "native"}
    file.write_text(json.dumps({"spec": spec}))
    with pytest.raises(Refused) as refused:
        platform.create("disks", "-f", str(file))
    assert "spec.domain.devices.disks[0].io: native needs cache" in refused.value.text


def _limits_and_media_change_while_it_runs(platform: Platform, view: Json) -> None:
    def limits() -> Any:
        return platform.get("disks")["disk_limits"].get("tuned")

    until(lambda: limits() == {"iops": 5000}, "it is read")
    now = platform.get("disks")
    tuned = next(one for one in now["spec"]["domain"]["devices"]["disks"] if one["name"] == "tuned")
    tuned["limits"] = {"write_iops": 70}
    update = {"uid": view["uid"], "revision": now["revision"], "spec": now["spec"]}
    platform.ask("vm.update", update)
    until(lambda: limits() == {"write_iops": 70}, "it is set")
    platform.cli("vm", "eject", "disks", "cd")
    until(lambda: "disk-cd" not in _xml(view), "it is ejected")
    platform.cli("vm", "insert", "disks", "cd")
    until(lambda: "disk-cd" in _xml(view), "it is inserted")
    conditions = {one["type"] for one in platform.get("disks")["conditions"] if one["status"]}
    assert conditions <= {"Ready"}


WATCHES = """#!/bin/sh
last=
while sleep 1; do
    now=$(for cd in /dev/sr*; do dd if=$cd bs=1 skip=32808 count=12 2>/dev/null; done)
    [ "$now" = "$last" ] || echo "MEDIA=$now" > /dev/ttyS0
    last=$now
done &
"""


def test_a_running_guest_reads_another_medium_of_its_drive(
    platform: Platform, tmp_path: Path
) -> None:
    for label in ("first-medium", "other-medium"):
        iso = pycdlib.PyCdlib()
        iso.new(vol_ident=label.upper().replace("-", "_"))
        iso.write(str(platform.state_dir / "images" / "src" / f"{label}.iso"))
        iso.close()
    disks: list[dict[str, Any]] = [
        {"name": "root"},
        {"name": "cd", "bus": "sata", "device": "cdrom"},
        {"name": "seed", "bus": "sata", "device": "cdrom"},
    ]
    image = platform.state_dir / "images" / "src" / "first-medium.iso"
    volumes: list[dict[str, Any]] = [
        {"name": "root", "image": {"ref": "tiny"}},
        {"name": "cd", "image": {"ref": f"file://{image}"}},
        {"name": "seed", "cloud_init_no_cloud": {"user_data": WATCHES}},
    ]
    spec = {"domain": {"devices": {"disks": disks}}, "volumes": volumes}
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"spec": spec}))
    view = platform.create("media", "-f", str(file), wait="ready")
    until(lambda: "FIRST_MEDIUM" in platform.console_log("media"), "the guest reads it")
    other = f"file://{image.with_name('other-medium.iso')}"
    platform.cli("vm", "insert", "media", "cd", other)
    until(lambda: "OTHER_MEDIUM" in platform.console_log("media"), "the guest reads the other")
    uid = view["uid"]
    folder = platform.state_dir / "vms" / uid
    until(lambda: len(list(folder.glob("disk-cd.*"))) == 1, "the former medium is gone")
    conditions = {one["type"] for one in platform.get("media")["conditions"] if one["status"]}
    assert conditions <= {"Ready"}
    platform.cli("vm", "eject", "media", "cd")
    platform.cli("vm", "restart", "media", "--wait")
    assert "disk-cd" not in _xml(view)
    platform.cli("vm", "insert", "media", "cd")
    until(lambda: "disk-cd" in _xml(view), "it is inserted again")
    platform.delete("media")


def _xml(view: Json) -> str:
    return host.run("virsh", "-c", "qemu:///system", "dumpxml", f"vb-{view['uid']}")
