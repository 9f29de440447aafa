"""The hardware fields of a VMI's status."""

from typing import Any

import pytest
from services.kubebridge.tests.manifests import UID, vmi
from services.kubebridge.tests.world import NOW, view, vmi_said

from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.kubebridge.core.vmi.status import Seen, described, qos_class, volume_status
from virtbus.schemas.vm import Disk, DiskBus


def disks(*buses: DiskBus) -> tuple[Disk, ...]:
    """Return disk-9, disk-8 and so on, so that their order is not alphabetical."""
    return tuple(Disk(name=f"disk-{9 - at}", bus=bus) for at, bus in enumerate(buses))


def test_a_disk_has_the_name_that_its_node_gives_it() -> None:
    buses = (DiskBus.VIRTIO, DiskBus.SATA, DiskBus.VIRTIO, DiskBus.SCSI, DiskBus.SATA)
    said = {one["name"]: one["target"] for one in volume_status(disks(*buses))}
    assert list(said) == sorted(said)
    assert [said[disk.name] for disk in disks(*buses)] == ["vda", "sda", "vdb", "sdb", "sdc"]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({}, "Burstable"),
        ({"requests": {"memory": "1Gi"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        (
            {"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "1Gi"}},
            "Burstable",
        ),
    ],
)
def test_the_qos_class_is_that_of_a_pod(resources: Any, said: str) -> None:
    assert qos_class(read(Vmi, {"spec": {"domain": {"resources": resources}}})) == said


def test_the_default_machine_is_q35() -> None:
    assert described(read(Vmi, {}), ())["machine"] == {"type": "q35"}
    given = {"spec": {"domain": {"machine": {"type": "pc-q35-8.0"}}}}
    assert described(read(Vmi, given), ())["machine"] == {"type": "pc-q35-8.0"}


def test_without_a_view_the_written_status_is_kept() -> None:
    one = vmi()
    one["status"] = vmi_said(one, Seen(view=view(UID)), NOW)
    after = vmi_said(one, Seen(), NOW)
    for key in ("machine", "qosClass", "volumeStatus"):
        assert after[key] == one["status"][key]
