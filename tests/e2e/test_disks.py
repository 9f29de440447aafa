"""A VM with a disk on each bus, and tuned disks, starts on the whole platform."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.platform import Platform, Refused

from virtbus.schemas.disk import DiskBus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_a_vm_with_a_disk_on_each_bus_starts_with_its_properties(
    platform: Platform, tmp_path: Path
) -> None:
    disks: list[dict[str, Any]] = [
        *({"name": f"on-{bus}", "bus": bus} for bus in DiskBus),
        {"name": "tuned", "cache": "none", "io": "native", "limits": {"iops": 5000}},
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
    platform.create("disks", "-f", str(file))
    platform.delete("disks")

    disks[0] |= {"io": "native"}
    file.write_text(json.dumps({"spec": spec}))
    with pytest.raises(Refused) as refused:
        platform.create("disks", "-f", str(file))
    assert "spec.domain.devices.disks[0].io: native needs cache" in refused.value.text
