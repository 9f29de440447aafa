"""A VM with a disk on each bus, and tuned disks, starts on the whole platform."""

import json
from pathlib import Path
from typing import Any

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


def _xml(view: Json) -> str:
    return host.run("virsh", "-c", "qemu:///system", "dumpxml", f"vb-{view['uid']}")
