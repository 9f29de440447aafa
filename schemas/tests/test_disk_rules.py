"""Rules between the fields of disks, and the table of buses and verbs."""

from typing import Any

import pytest

from virtbus.schemas.disk import SERIAL_MAX, Disk, DiskBus, IoThreads, target_names
from virtbus.schemas.disk_buses import ABILITIES, MAX_DISKS, Verb
from virtbus.schemas.disk_rules import DISKS, disk_problems


def problems(*disks: dict[str, Any]) -> dict[str, str]:
    """Return the messages of all problems by path, without the prefix of the list."""
    named = [Disk.model_validate({"name": f"d{n}"} | disk) for n, disk in enumerate(disks)]
    found = disk_problems(dict(enumerate(named)))
    return {one.path.removeprefix(DISKS): one.message for one in found}


def test_each_bus_says_what_it_does_with_each_verb() -> None:
    assert set(ABILITIES) == set(MAX_DISKS) == set(DiskBus)
    for verbs in ABILITIES.values():
        assert set(verbs) == set(Verb)
        assert all(ability.why for ability in verbs.values() if ability.refused)


@pytest.mark.parametrize("bus", DiskBus)
def test_one_disk_more_than_a_bus_has_is_refused(bus: DiskBus) -> None:
    most = MAX_DISKS[bus]
    crowd = [{"bus": bus}] * (most + 3)
    assert not problems(*crowd[:most])
    assert list(problems(*crowd)) == [f"[{most}].bus"]
    assert f"at most {most} disks" in problems(*crowd)[f"[{most}].bus"]


def test_a_device_that_its_bus_does_not_have_is_refused_with_the_reason() -> None:
    found = problems(
        {"bus": "usb", "device": "cdrom"},
        {"bus": "sata", "readonly": True},
        {"bus": "sata", "device": "cdrom", "readonly": True},
        {"bus": "usb", "readonly": True},
    )
    assert set(found) == {"[0].device", "[1].readonly"}
    assert "use sata or scsi" in found["[0].device"]


def test_only_a_drive_whose_media_can_be_changed_has_a_tray() -> None:
    found = problems(
        {"tray": "open"},
        {"tray": "open", "device": "cdrom"},
        {"tray": "open", "device": "cdrom", "bus": "sata"},
        {"tray": "forced-open", "device": "cdrom", "bus": "scsi"},
    )
    assert set(found) == {"[0].tray", "[1].tray"}
    assert "only a cdrom" in found["[0].tray"]
    assert "no CD-ROM drives" in found["[1].tray"]


def test_a_boot_order_is_given_once_on_all_buses() -> None:
    orders = ({"boot_order": 1}, {"bus": "scsi", "boot_order": 2}, {"bus": "usb", "boot_order": 1})
    assert list(problems(*orders)) == ["[2].boot_order"]


def test_a_sata_disk_that_the_firmware_does_not_see_cannot_be_booted_from() -> None:
    disks = [{"bus": "sata"}] * 24
    assert not problems(*disks[:11], disks[0] | {"boot_order": 1}, *disks[12:])
    late = problems(*disks[:12], disks[0] | {"boot_order": 1}, *disks[13:])
    assert list(late) == ["[12].bus"]


def test_a_serial_is_the_name_or_made_of_it_within_what_each_bus_has() -> None:
    assert Disk(name="data").guest_serial == "data"
    assert Disk(name="data", serial="A_1.b").guest_serial == "A_1.b"
    long = Disk(name="database-of-the-shop-1").guest_serial
    assert long == "database-of-dadc296f"
    assert len(long) <= SERIAL_MAX
    assert long != Disk(name="database-of-the-shop-2").guest_serial


def test_serials_are_unique_also_if_one_is_a_name() -> None:
    found = problems({"serial": "d1"}, {"bus": "scsi"}, {"bus": "usb", "serial": "d2"})
    assert list(found) == ["[1].serial"]


def test_targets_continue_after_z() -> None:
    disks = [Disk(name=f"d{n}", bus=DiskBus.SCSI) for n in range(60)]
    names = list(target_names([Disk(name="root"), *disks]))
    assert names[:3] == ["vda", "sda", "sdb"]
    assert names[26:29] == ["sdz", "sdaa", "sdab"]
    assert names[53] == "sdba"
    nvme = Disk(name="n", bus=DiskBus.NVME)
    assert list(target_names([nvme, Disk(name="root"), nvme])) == ["nvme0n1", "vda", "nvme1n1"]


@pytest.mark.parametrize(
    ("disk", "wrong"),
    [
        ({"io": "native"}, ["io"]),
        ({"io": "native", "cache": "writeback"}, ["io"]),
        ({"io": "native", "cache": "none"}, []),
        ({"io": "io_uring"}, []),
        ({"detect_zeroes": "unmap"}, []),
        ({"detect_zeroes": "unmap", "discard": "ignore"}, ["detect_zeroes"]),
        ({"bus": "usb", "discard": "unmap", "detect_zeroes": "on"}, ["discard"]),
        ({"bus": "usb", "discard": "ignore"}, []),
        ({"dedicated_io_thread": True}, []),
        ({"bus": "scsi", "dedicated_io_thread": True}, ["dedicated_io_thread"]),
        ({"bus": "sata", "dedicated_io_thread": False}, []),
        ({"block_size": {"logical_bytes": 4096}}, []),
        ({"block_size": {"logical_bytes": 1000}}, ["block_size.logical_bytes"]),
        (
            {"block_size": {"logical_bytes": 4096, "physical_bytes": 512}},
            ["block_size.physical_bytes"],
        ),
        ({"bus": "sata", "block_size": {"physical_bytes": 4096}}, []),
        ({"bus": "sata", "block_size": {"logical_bytes": 4096}}, ["block_size.logical_bytes"]),
        ({"bus": "usb", "block_size": {"physical_bytes": 4096}}, ["block_size"]),
        ({"bus": "scsi", "device": "cdrom", "block_size": {}}, ["block_size"]),
        ({"bus": "nvme", "error_policy": "report", "cache": "none", "io": "native"}, []),
        ({"bus": "nvme", "error_policy": "stop"}, ["error_policy"]),
        ({"bus": "nvme", "read_error_policy": "ignore"}, ["read_error_policy"]),
        ({"bus": "nvme", "limits": {"iops": 50}}, ["limits"]),
        ({"bus": "nvme", "readonly": True}, ["readonly"]),
        ({"bus": "nvme", "device": "cdrom"}, ["device"]),
        ({"limits": {"bytes_per_s": "8MB", "read_iops": 50, "write_iops": 20}}, []),
        ({"limits": {"bytes_per_s": 10, "read_bytes_per_s": 10}}, ["limits.bytes_per_s"]),
        ({"limits": {"burst_s": 5}}, ["limits.burst_s"]),
        ({"limits": {"iops": 50, "burst": {"iops": 100}, "burst_s": 5}}, []),
        ({"limits": {"iops": 50, "burst": {"iops": 20}}}, ["limits.burst.iops"]),
        ({"limits": {"iops": 50, "burst": {"read_iops": 100}}}, ["limits.burst.read_iops"]),
        (
            {"limits": {"iops": 50, "burst": {"iops": 10**14}, "burst_s": 11}},
            ["limits.burst.iops"],
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused_at_their_field(
    disk: dict[str, Any], wrong: list[str]
) -> None:
    assert list(problems(disk)) == [f"[0].{field}" for field in wrong]


@pytest.mark.parametrize(
    ("threads", "fine"),
    [
        ({"policy": "shared"}, True),
        ({"policy": "pool", "count": 4}, True),
        ({"policy": "pool"}, False),
        ({"policy": "auto", "count": 4}, False),
    ],
)
def test_only_a_pool_has_a_count(threads: dict[str, Any], fine: bool) -> None:
    found = [one.path for one in disk_problems({}, IoThreads.model_validate(threads))]
    assert found == ([] if fine else ["spec.domain.io_threads.count"])
