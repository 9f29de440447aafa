"""Disks of each bus on the real libvirtd, and as a guest with all drivers finds them."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libvirt
import pytest
from services.nodeagent.tests.libvirt_host import (
    POWERS_OFF,
    URI,
    Host,
    folder,
    heard,
    host,
    pid_of,
)

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.disks import drives as wanted_drives
from virtbus.nodeagent.core.plugs import GuestDisks
from virtbus.nodeagent.core.ports import DomainChange
from virtbus.nodeagent.edge.libvirt_disks import media
from virtbus.nodeagent.vm.operations.limits import limit
from virtbus.schemas.disk import DISKS_MAX, CacheMode, IoThreads, IoThreadsPolicy
from virtbus.schemas.disk_buses import ABILITIES, BOOTABLE_SATA, MAX_DISKS, Verb, Verdict
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.seed import CloudInitNoCloud
from virtbus.schemas.vm import (
    Devices,
    Disk,
    DiskBus,
    Domain,
    EmptyDisk,
    Interface,
    Memory,
    VmRecord,
    VmSpec,
    Volume,
)

__all__ = ["folder", "host"]  # fixtures

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
MIB = 2**20
SMALL_FIRST = sorted(DiskBus, key=MAX_DISKS.__getitem__)


def drives(*disks: Disk, memory_mib: int = 32) -> VmSpec:
    """Return a guest with these disks, and the root ports of all NICs."""
    nics = tuple(Interface(name=f"n{n}") for n in range(NICS_MAX))
    seed = CloudInitNoCloud(user_data="#!/bin/sh\n")
    return VmSpec(
        domain=Domain(
            memory=Memory(guest=memory_mib * 2**20), devices=Devices(disks=disks, interfaces=nics)
        ),
        volumes=tuple(
            Volume(name="seed", cloud_init_no_cloud=seed)
            if disk.name == "seed"
            else Volume(name=disk.name, empty_disk=EmptyDisk(capacity=2**20))
            for disk in disks
        ),
    )


async def starts(host: Host, spec: VmSpec) -> VmRecord:
    """Start a guest of `spec`, and check that libvirt changes none of its addresses."""
    record = host.record(spec)
    await host.define(record)
    before = _reserved_ports_in_use(record.uid)
    await host.hypervisor.start(record.uid)
    assert before == _reserved_ports_in_use(record.uid) == set()
    return record


async def test_disks_of_every_bus_with_nine_sata_start(host: Host) -> None:
    many = [
        Disk(name=f"{bus}{n}", bus=bus)
        for bus in DiskBus
        for n in range(9 if bus is DiskBus.SATA else 2)
    ]
    drive = Disk(name="seed", device="cdrom")
    await starts(host, drives(Disk(name="root"), drive, *many))


async def test_a_guest_starts_with_each_property_of_its_disks(host: Host) -> None:
    bus_properties: dict[str, dict[str, Any]] = {
        "virtio": {"dedicated_io_thread": True, "block_size": {"logical_bytes": 4096}},
        "scsi": {"block_size": {"logical_bytes": 4096}},
        "sata": {"block_size": {"physical_bytes": 4096}},
        "usb": {},
        "nvme": {"block_size": {"logical_bytes": 4096}},
    }
    burst = {"burst": {"iops": 100}, "burst_s": 5}
    common = {"detect_zeroes": "on", "limits": {"bytes_per_s": "8MiB", "iops": 50} | burst}
    io = [
        {"cache": "none", "io": "native"},
        {"cache": "directsync", "io": "io_uring"},
        {"cache": "unsafe", "error_policy": "stop", "read_error_policy": "ignore"},
    ]
    disks = [
        Disk.model_validate(
            _allowed({"name": f"{bus}{n}", "bus": bus} | common | more | one, DiskBus(bus))
        )
        for bus, more in bus_properties.items()
        for n, one in enumerate(io)
    ]
    drive = Disk(name="empty", bus=DiskBus.SATA, device="cdrom", cache=CacheMode.NONE)
    spec = drives(*disks, drive)
    threads = IoThreads(policy=IoThreadsPolicy.AUTO)
    domain = spec.domain.model_copy(update={"io_threads": threads})
    volumes = tuple(volume for volume in spec.volumes if volume.name != "empty")
    record = await starts(host, spec.model_copy(update={"domain": domain, "volumes": volumes}))
    connection = libvirt.open(URI)
    try:
        running = connection.lookupByUUIDString(record.uid)
        assert len(running.ioThreadInfo()) == 4
        for target in ("vda", "sda"):
            limits = running.blockIoTune(target)
            assert (limits["total_bytes_sec"], limits["total_iops_sec_max"]) == (2**23, 100)
    finally:
        connection.close()


async def test_media_of_a_running_guest_are_ejected_and_inserted(host: Host) -> None:
    buses = [bus for bus in DiskBus if not ABILITIES[bus][Verb.MEDIA_CHANGE].refused]

    def with_tray(tray: str | None) -> VmSpec:
        given = ({"name": bus, "bus": bus, "device": "cdrom", "tray": tray} for bus in buses)
        return drives(Disk(name="root"), *(Disk.model_validate(one) for one in given))

    record = await starts(host, with_tray(None))
    files = {str(bus): DiskSource(str(host.path(record, bus)), ImageFormat.RAW) for bus in buses}
    inside = {at: one.path for at, one in wanted_drives(record.spec.domain, files, {}).items()}
    assert sorted(inside) == ["sda", "sdb"]
    connection = libvirt.open(URI)
    try:
        domain = connection.lookupByUUIDString(record.uid)
        for tray in ("open", None, "forced-open", "closed"):
            now = wanted_drives(with_tray(tray).domain, files, {})
            await host.hypervisor.set_drives(record.uid, now)
            await host.hypervisor.set_drives(record.uid, now)
            empty = tray in {"open", "forced-open"}
            found = media(domain.XMLDesc())
            assert {at: found[at] for at in inside} == {
                at: "" if empty else path for at, path in inside.items()
            }
        for old in inside.values():
            shutil.copy(old, f"{old}.other")
        others = {bus: DiskSource(f"{one.path}.other", one.format) for bus, one in files.items()}
        await host.hypervisor.set_drives(
            record.uid, wanted_drives(with_tray(None).domain, others, {})
        )
        found = media(domain.XMLDesc())
        assert [found[at] for at in inside] == [f"{one}.other" for one in inside.values()]
    finally:
        connection.close()


async def test_limits_of_a_running_guest_change_and_end_on_each_bus(host: Host) -> None:
    """The call removes a limit with its burst, and the figures are libvirt's own."""
    buses = [bus for bus in DiskBus if not ABILITIES[bus][Verb.LIMITS].refused]
    first = {"iops": 50, "burst": {"iops": 100}, "burst_s": 5}
    drive = Disk(name="empty", bus=DiskBus.SATA, device="cdrom")

    def limited(limits: dict[str, Any] | None) -> VmSpec:
        given = ({"name": bus, "bus": bus, "limits": limits} for bus in buses)
        spec = drives(*(Disk.model_validate(one) for one in given), drive)
        full = tuple(volume for volume in spec.volumes if volume.name != "empty")
        return spec.model_copy(update={"volumes": full})

    record = await starts(host, limited(first))
    shown = {"iops": 50, "burst_iops": 100, "burst_s": 5}
    assert await limit(record, host.hypervisor, GuestDisks()) == dict.fromkeys(buses, shown)
    for limits in ({"read_bytes_per_s": 2**20, "write_iops": 9}, {"bytes_per_s": 2**23}, first):
        now = record.model_copy(update={"spec": limited(limits)})
        found = await limit(now, host.hypervisor, GuestDisks())
        assert found == dict.fromkeys(buses, shown if limits is first else limits)
    without = record.model_copy(update={"spec": limited(None)})
    assert await limit(without, host.hypervisor, GuestDisks()) == {}
    await host.hypervisor.destroy(record.uid)
    assert await limit(record, host.hypervisor, GuestDisks()) == {}


def _allowed(disk: dict[str, Any], bus: DiskBus) -> dict[str, Any]:
    """Return the disk without the properties that its bus does not have."""
    verbs = {"limits": Verb.LIMITS, "error_policy": Verb.ERROR_POLICY}
    verbs["read_error_policy"] = Verb.ERROR_POLICY
    lacking = {name for name, verb in verbs.items() if ABILITIES[bus][verb].refused}
    return {name: value for name, value in disk.items() if name not in lacking}


@pytest.mark.parametrize("bus", DiskBus)
async def test_a_guest_boots_from_the_first_disk_of_the_order_on_any_bus(
    host: Host, bus: DiskBus
) -> None:
    disks = (Disk(name="halts", boot_order=2), Disk(name="first", bus=bus, boot_order=1))
    record = host.record(drives(*disks))
    async with host.hypervisor.events() as events:
        await host.define(record, codes={"first": POWERS_OFF})
        await host.hypervisor.start(record.uid)
        await heard(events, record.uid, DomainChange.SHUT_DOWN)


def full(*buses: DiskBus) -> list[Disk]:
    """Return all disks that fit on the buses, the last one to boot from; SCSI may have fewer."""
    disks = [Disk(name=f"{bus}{n}", bus=bus) for bus in buses for n in range(MAX_DISKS[bus])]
    disks = disks[:DISKS_MAX]
    boot = BOOTABLE_SATA - 1 if buses == (DiskBus.SATA,) else len(disks) - 1
    disks[boot] = disks[boot].model_copy(update={"boot_order": 1})
    return disks


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("buses", [*((bus,) for bus in DiskBus), (*SMALL_FIRST,)], ids=str)
async def test_a_guest_boots_from_the_last_disk_of_full_buses(
    host: Host, buses: tuple[DiskBus, ...]
) -> None:
    disks = full(*buses)
    record = host.record(drives(*disks))
    async with host.hypervisor.events() as events:
        await host.define(record, codes={one.name: POWERS_OFF for one in disks if one.boot_order})
        await host.hypervisor.start(record.uid, paused=True)
        assert _reserved_ports_in_use(record.uid) == set()
        opened = Path(f"/proc/{pid_of(record.uid)}/fd").iterdir()
        files = {os.readlink(one) for one in opened}
        assert len({one for one in files if one.endswith(".img")}) == len(disks)
        await host.hypervisor.resume(record.uid)
        async with asyncio.timeout(200):
            await heard(events, record.uid, DomainChange.SHUT_DOWN)


@dataclass(frozen=True)
class Probed:
    """A disk of the probe, and the facts that its guest should report."""

    disk: Disk
    mib: int
    facts: dict[str, str]


def probed() -> list[Probed]:
    """Return for each bus: a plain disk, one with a long name, and those that the table allows."""
    made = []
    for bus in DiskBus:
        abilities = ABILITIES[bus]
        discards = "yes" if abilities[Verb.DISCARD].verdict is Verdict.WORKS else "no"
        plain: dict[str, Any] = {"name": f"{bus}-plain"}
        facts = {"bus": str(bus), "ro": "0", "discards": discards}
        made.append(({**plain}, facts))
        made.append(({"name": f"a-long-name-of-a-volume-on-{bus}"}, facts))
        if not abilities[Verb.READONLY].refused:
            made.append(({"name": f"{bus}-ro", "readonly": True}, facts | {"ro": "1"} | NO_DISCARD))
        if not abilities[Verb.CDROM].refused:
            drive = {"name": f"{bus}-cd", "device": "cdrom"}
            # sysfs has no serial of a CD-ROM drive
            hidden = {} if bus is DiskBus.VIRTIO else {"serial": ""}
            made.append((drive, {"bus": str(bus)} | NO_DISCARD | hidden))
        if not abilities[Verb.BLOCK_SIZE].refused:
            size = {"logical_bytes": 512 if bus is DiskBus.SATA else 4096, "physical_bytes": 4096}
            shown = {"logical": str(size["logical_bytes"]), "physical": "4096"}
            made.append(({"name": f"{bus}-4k", "block_size": size}, facts | shown))
    return [
        Probed(Disk.model_validate({"bus": facts["bus"]} | fields), 1 + at, facts)
        for at, (fields, facts) in enumerate(made)
    ]


NO_DISCARD = {"discards": "no"}
ENDS = (DomainChange.SHUT_DOWN, DomainChange.CRASHED, DomainChange.REBOOTED)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_guest_finds_each_disk_by_its_serial_with_its_size_and_abilities(
    host: Host,
) -> None:
    image = host.folder / "probe.img"
    subprocess.run([str(ROOT / "images/disk-probe/build"), str(image)], check=True)
    expected = probed()
    boot = Disk(name="probe", boot_order=1)
    record = host.record(drives(boot, *(one.disk for one in expected), memory_mib=256))
    async with host.hypervisor.events() as events:
        await host.define(record)
        shutil.copyfile(image, host.path(record, "probe"))
        for one in expected:
            os.truncate(host.path(record, one.disk.name), one.mib * MIB)
        await host.hypervisor.start(record.uid)
        async with asyncio.timeout(600):
            async for event in events:
                if event.uid == record.uid and event.change in ENDS:
                    break
    log = host.files.console_log(record.uid).read_text(errors="replace")
    found = {int(line["sectors"]): line for line in _reported(log)}
    for one in expected:
        facts = found.pop(one.mib * 2048)
        wanted = {"serial": one.disk.guest_serial} | one.facts
        assert facts | wanted == facts, one.disk.name
        blocks = host.path(record, one.disk.name).stat().st_blocks
        assert (blocks < 64) == (facts["discards"] == "yes"), one.disk.name
    assert [line["serial"] for line in found.values()] == ["probe"], log


def _reported(log: str) -> Iterator[dict[str, str]]:
    for line in log.splitlines():
        if line.startswith("PROBE "):
            yield dict(re.findall(r"(\w+)=(\S*)", line))


def _reserved_ports_in_use(uid: str) -> set[str]:
    """Return ports of NICs (1 to 8) that libvirt gave to another device."""
    connection = libvirt.open(URI)
    try:
        text = connection.lookupByUUIDString(uid).XMLDesc()
    finally:
        connection.close()
    return {f"0x{n:02x}" for n in range(1, 9) if f"bus='0x{n:02x}'" in text}
