"""A device that begins with an image: written once, kept for later VMs, never another's."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import record
from services.imaged.tests.site_under_test import FAST, MIB, Node, NodeMaker

from virtbus.imaged import device_roots
from virtbus.imaged.core.device_marks import END_BYTES
from virtbus.imaged.device_roots import DeviceRoots
from virtbus.imaged.device_volumes import DeviceVolumes
from virtbus.imaged.edge.device_io import Device
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmRecord, Volume
from virtbus.schemas.volume_ref import HostDevice

SIZE = 4 * MIB
DEVICE, LINK = "/dev/vg0/root", "/dev/mapper/vg0-root"
NOBODY = Asker()


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the device that the agent opens."""
    path = tmp_path / "device"
    path.write_bytes(bytes(SIZE + END_BYTES))

    def opened(door: Path, asked: str) -> int:
        assert door.name == "devices.sock"
        assert asked in {DEVICE, LINK}
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    monkeypatch.setattr(device_roots, "open_host_device", opened)
    return path


def image(node: Node, name: str, content: bytes) -> str:
    """Put a raw image into the node's source; return its reference."""
    path = node.source_dir / f"{name}.img"
    path.write_bytes(content.ljust(MIB, b"\0"))
    return f"file://{path}"


def root(ref: str, path: str = DEVICE) -> VmRecord:
    """A VM whose root disk is the device."""
    return record(Volume(name="root", host_device=HostDevice(path=path, image=ref)))


def roots(node: Node, threads: DiskThreads) -> DeviceRoots:
    door = node.state / "devices.sock"
    return DeviceRoots(node.images, node.store, node.disks.pools, threads, FAST, door)


async def refusal(of: DeviceRoots, whole: VmRecord) -> str:
    with pytest.raises(VirtbusError) as caught:
        await of.ensure(whole, NOBODY)
    return caught.value.reason


async def test_the_image_is_written_once_and_the_content_stays(
    make_node: NodeMaker, threads: DiskThreads, device: Path
) -> None:
    async with make_node() as node:
        wanted = root(image(node, "one", b"first"))
        await roots(node, threads).ensure(wanted, NOBODY)
        assert device.read_bytes().startswith(b"first\0")
        with device.open("r+b") as file:
            file.write(b"of the guest")
        await roots(node, threads).ensure(wanted, NOBODY)
    assert device.read_bytes().startswith(b"of the guest")


async def test_another_image_another_content_and_a_small_device_are_refused_and_nothing_is_written(
    make_node: NodeMaker, threads: DiskThreads, device: Path
) -> None:
    async with make_node() as node:
        one, two = (root(image(node, name, name.encode())) for name in ("one", "two"))
        of = roots(node, threads)
        device.write_bytes(b"foreign".ljust(SIZE + END_BYTES, b"\0"))
        before = device.read_bytes()
        assert await refusal(of, one) == "device_not_blank"
        assert device.read_bytes() == before
        device.write_bytes(bytes(MIB // 2 + END_BYTES))
        assert await refusal(of, one) == "disk_too_large"
        assert not any(device.read_bytes())
        device.write_bytes(bytes(SIZE + END_BYTES))
        await of.ensure(one, NOBODY)
        before = device.read_bytes()
        assert await refusal(of, two) == "device_other_image"
        assert device.read_bytes() == before
        await of.ensure(one, NOBODY)  # a return to the first image finds its content


async def test_two_vms_that_name_one_device_by_two_paths_write_it_once(
    make_node: NodeMaker, threads: DiskThreads, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill: Any = DeviceVolumes.fill
    fills = 0

    async def counted(*args: Any) -> None:
        nonlocal fills
        fills += 1
        await fill(*args)

    monkeypatch.setattr(DeviceVolumes, "fill", counted)
    async with make_node() as node:
        ref, of = image(node, "one", b"first"), roots(node, threads)
        async with asyncio.TaskGroup() as group:
            for path in (DEVICE, LINK):
                group.create_task(of.ensure(root(ref, path), NOBODY))
    assert fills == 1
    assert device.read_bytes().startswith(b"first\0")


class CrashError(Exception):
    """The process dies here."""


async def test_a_crash_at_any_write_leaves_a_device_that_is_written_again(
    make_node: NodeMaker, threads: DiskThreads, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Any = Device.write
    left = 0

    def dying(self: Device, at: int, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise CrashError
        write(self, at, data)

    monkeypatch.setattr(Device, "write", dying)
    async with make_node() as node:
        wanted, of = root(image(node, "one", b"first")), roots(node, threads)
        for writes in range(1, 20):
            device.write_bytes(bytes(SIZE + END_BYTES))
            left = writes
            try:
                await of.ensure(wanted, NOBODY)
            except CrashError:
                left = 0
                await of.ensure(wanted, NOBODY)
                assert device.read_bytes().startswith(b"first\0")
            else:
                assert writes > 3
                return
    pytest.fail("a device takes fewer writes")
