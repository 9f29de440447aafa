"""The properties of disks in the domain's XML, and the threads of QEMU."""

from typing import Any
from xml.etree import ElementTree

import pytest

from virtbus.nodeagent.core.disk_drivers import blockio_element, driver_element, iotune_element
from virtbus.nodeagent.core.io_threads import IoThreadPlan, io_threads
from virtbus.schemas.disk import BlockSize, Disk, DiskLimits
from virtbus.schemas.vm import Domain


def driver(**fields: Any) -> dict[str, str]:
    """Return the attributes of the driver of a qcow2 disk, without its name and type."""
    disk = Disk.model_validate({"name": "root"} | fields)
    attributes = dict(driver_element(disk, "qcow2", None).items())
    assert (attributes.pop("name"), attributes.pop("type")) == ("qemu", "qcow2")
    return attributes


def test_each_property_of_a_driver_is_libvirts() -> None:
    assert driver() == {"discard": "unmap"}
    assert driver(
        cache="none", io="native", discard="ignore", detect_zeroes="on", error_policy="stop"
    ) == {
        "cache": "none",
        "io": "native",
        "discard": "ignore",
        "detect_zeroes": "on",
        "error_policy": "stop",
    }
    assert driver(read_error_policy="report")["rerror_policy"] == "report"


def test_a_disk_that_cannot_discard_has_none() -> None:
    assert driver(bus="usb") == driver(readonly=True) == driver(bus="sata", device="cdrom") == {}


def test_limits_are_libvirts_iotune_with_the_length_of_each_burst() -> None:
    limits = {"bytes_per_s": 10, "read_iops": 5, "burst": {"read_iops": 50}, "burst_s": 3}
    element = iotune_element(DiskLimits.model_validate(limits))
    assert element is not None
    assert {child.tag: child.text for child in element} == {
        "total_bytes_sec": "10",
        "read_iops_sec": "5",
        "read_iops_sec_max": "50",
        "read_iops_sec_max_length": "3",
    }
    assert iotune_element(DiskLimits()) is None


def test_the_physical_block_is_never_smaller_than_the_logical_one() -> None:
    element = blockio_element(BlockSize(logical_bytes=4096))
    assert element is not None
    assert ElementTree.tostring(element, encoding="unicode") == (
        '<blockio logical_block_size="4096" physical_block_size="4096" />'
    )
    assert blockio_element(BlockSize()) is None


DISKS = (
    {"name": "a"},
    {"name": "b", "dedicated_io_thread": True},
    {"name": "c"},
    {"name": "s", "bus": "scsi"},
    {"name": "t", "bus": "sata"},
)


@pytest.mark.parametrize(
    ("threads", "vcpus", "plan"),
    [
        (None, 1, IoThreadPlan(1, {"b": 1}, None)),
        ({"policy": "shared"}, 1, IoThreadPlan(2, {"a": 1, "c": 1, "": 1, "b": 2}, 1)),
        ({"policy": "auto"}, 1, IoThreadPlan(2, {"a": 1, "c": 1, "": 1, "b": 2}, 1)),
        ({"policy": "auto"}, 8, IoThreadPlan(4, {"a": 1, "c": 2, "": 3, "b": 4}, 3)),
        (
            {"policy": "pool", "count": 2},
            1,
            IoThreadPlan(3, {"a": 1, "c": 2, "": 1, "b": 3}, 1),
        ),
    ],
)
def test_threads_are_shared_by_the_policy_and_dedicated_beyond(
    threads: dict[str, Any] | None, vcpus: int, plan: IoThreadPlan
) -> None:
    domain = {"cpu": {"cores": vcpus}, "devices": {"disks": DISKS}, "io_threads": threads}
    assert io_threads(Domain.model_validate(domain)) == plan


def test_a_domain_without_a_policy_has_no_threads() -> None:
    assert io_threads(Domain.model_validate({"devices": {"disks": [{"name": "a"}]}})).total == 0
