"""imaged gets the devices of the pools, and only those, from the agent."""

import asyncio
import errno
import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import record
from services.nodeagent.tests.test_disk_files import ROOT_DISK
from services.nodeagent.tests.test_network_disks import REF
from services.nodeagent.tests.test_volume_disks import MADE, SPEC

from virtbus.bus.runtime.device_socket import open_device, open_host_device, refuse_used
from virtbus.bus.runtime.pool_settings import BlockPool, LvmPool
from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.core.addresses import assigned
from virtbus.nodeagent.core.disk_sources import devices_with_images, held_volumes
from virtbus.nodeagent.core.disks import hot_disk
from virtbus.nodeagent.core.element import to_text
from virtbus.nodeagent.core.logical_volumes import lv_name
from virtbus.nodeagent.edge import device_door
from virtbus.nodeagent.edge.allowed_devices import open_exclusively
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.device_door import DeviceDoor
from virtbus.nodeagent.edge.disk_files import HostDiskFiles
from virtbus.nodeagent.edge.pool_devices import measured
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.pool import END_BYTES, PoolKind, PoolState

MIB = 1024**2
SURROGATE = rb'{"pool": "\ud800", "volume": ""}'


def pool(path: str) -> BlockPool:
    return BlockPool.model_validate({"kind": PoolKind.BLOCK, "volumes": {REF.key: path}})


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "disk"
    file.write_bytes(bytes(4 * MIB))
    asked = ["losetup", "--find", "--show", str(file)]
    device = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


async def asked(door: Path, name: str, volume: str) -> str:
    """Return the reason of a refusal; empty if there is a device."""
    try:
        device = await in_thread(lambda: open_device(door, name, volume))
    except OSError as error:
        return error.strerror or "closed"
    is_device = stat.S_ISBLK(os.fstat(device).st_mode)
    os.close(device)
    return "" if is_device else "no device"


async def test_the_door_survives_a_process_without_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, loop = tmp_path / "devices.sock", asyncio.get_running_loop()
    real, refused = loop.sock_accept, asyncio.Event()

    async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(listening)

    monkeypatch.setattr(loop, "sock_accept", accept)
    (tmp_path / "disks").mkdir()
    async with background() as tasks:
        tasks.start(DeviceDoor(door, tmp_path / "disks", {"none": pool("/dev/null")}).serve())
        async with asyncio.timeout(10):
            await refused.wait()
        assert "no block device" in await asked(door, "none", REF.key)


@pytest.mark.integration
async def test_only_devices_of_the_pools_are_opened(tmp_path: Path, loop: str) -> None:
    door = tmp_path / "devices.sock"
    (tmp_path / "disks").mkdir()
    pools = {"raw": pool(loop), "none": pool("/dev/null"), "gone": pool("/dev/no-such-disk")}
    async with background() as tasks:
        tasks.start(DeviceDoor(door, tmp_path / "disks", pools).serve())
        while not door.exists() or await asked(door, "raw", REF.key):
            with suppress(OSError):
                await in_thread(lambda: None)
        assert "nothing for shop.other" in await asked(door, "raw", "shop.other")
        assert "nothing for" in await asked(door, "../raw", REF.key)
        assert "no block device" in await asked(door, "none", REF.key)
        assert "No such file" in await asked(door, "gone", REF.key)
        (tmp_path / "disks").rmdir()  # whose owner is imaged
        assert "No such file" in await asked(door, "raw", REF.key)


@pytest.mark.integration
def test_a_pool_reports_its_devices_and_those_that_are_missing(loop: str) -> None:
    found = measured("raw", pool(loop))
    assert (found.state, found.size_bytes, found.assigned) == (
        PoolState.READY,
        4 * MIB,
        (REF.key,),
    )
    assert found.place_bytes == {REF.key: 4 * MIB - END_BYTES}
    gone = measured("raw", pool("/dev/no-such-disk"))
    assert (gone.state, "no-such-disk of shop.data-1" in gone.message) == (PoolState.GONE, True)


@pytest.mark.parametrize("path", ["/dev/sda", "/dev/nvme0n1", "/dev/disk/../sda", "/etc/shadow"])
def test_a_device_needs_a_name_that_stays(path: str) -> None:
    with pytest.raises(ValueError, match=r"by-id|pattern|empty part"):
        pool(path)
    assert pool("/dev/disk/by-id/wwn-0x5000").volumes


async def test_the_guest_sees_the_size_of_the_volume_and_not_the_marks(tmp_path: Path) -> None:
    ref = REF.model_copy(update={"pool": "raw", "kind": PoolKind.BLOCK})
    of = record(spec=SPEC).model_copy(update={"volume_refs": {"data": ref}})
    files = HostDiskFiles(tmp_path, {"raw": pool("/dev/disk/by-id/wwn-1")})
    source = (await files.sources(of, MADE))["data"]
    disk = of.spec.domain.devices.disks[0]
    text = to_text(hot_disk(disk, source, assigned(of.spec.domain, {})))
    for part in (
        '<disk type="block" device="disk">',
        '<source dev="/dev/disk/by-id/wwn-1"><slices><slice type="storage" offset="0" '
        'size="1048576" /></slices></source>',
        '<driver name="qemu" type="raw" discard="unmap"',
    ):
        assert part in text, text


async def test_the_guest_sees_all_of_a_logical_volume_once_imaged_has_made_it_large_enough(
    tmp_path: Path,
) -> None:
    ref = REF.model_copy(update={"pool": "fast", "kind": PoolKind.LVM})
    of = record(spec=SPEC).model_copy(update={"volume_refs": {"data": ref}})
    group = LvmPool.model_validate({"kind": PoolKind.LVM, "group": "vg0"})
    files = HostDiskFiles(tmp_path, {"fast": group})
    made = {"data": MadeDisk(virtual_size_bytes=ref.size_bytes)}
    source = (await files.sources(of, made))["data"]
    disk = of.spec.domain.devices.disks[0]
    text = to_text(hot_disk(disk, source, assigned(of.spec.domain, {})))
    name = lv_name(f"fast/{ref.folder}")
    assert '<disk type="block" device="disk">' in text
    assert f'<source dev="/dev/vg0/{name}" /><backingStore />' in text
    assert re.fullmatch(r"virtbus-[0-9a-f]{32}", name)
    small = {"data": MadeDisk(virtual_size_bytes=ref.size_bytes - 1)}
    with pytest.raises(VirtbusError, match="as large as its record says") as refused:
        await files.sources(of, small)
    assert refused.value.reason == "disk_refused"
    with pytest.raises(VirtbusError) as unknown:
        await HostDiskFiles(tmp_path, {"fast": pool("/dev/disk/by-id/a")}).sources(of, made)
    assert unknown.value.reason == "pool_unknown"


class OneFile(DeviceDoor):
    """Opens a file in place of each device, after `delay_s`."""

    file = Path()
    delay_s = 0.0

    def _opened(self, peer: socket.socket, want: dict[str, str]) -> int:
        if not self.file.name:
            return super()._opened(peer, want)
        time.sleep(self.delay_s)
        return os.open(self.file, os.O_RDONLY)


def is_open(path: Path) -> bool:
    """Return True if this process has a file open."""
    links = Path("/proc/self/fd")
    return str(path) in {os.path.realpath(one) for one in links.iterdir()}


@pytest.fixture
async def one_file(tmp_path: Path) -> AsyncIterator[tuple[OneFile, Path]]:
    path = tmp_path / "devices.sock"
    (tmp_path / "disks").mkdir()
    door = OneFile(path, tmp_path / "disks", {}, ("/dev/null",))
    async with background() as tasks:
        tasks.start(door.serve())
        while not path.exists():
            await asyncio.sleep(0.01)
        yield door, path
        assert "nothing for" in await asked(path, "raw", REF.key), "it still answers"


@pytest.mark.parametrize("granted", [False, True])
async def test_an_asker_that_goes_away_ends_nothing(
    one_file: tuple[OneFile, Path], tmp_path: Path, *, granted: bool
) -> None:
    door, path = one_file
    if granted:
        door.file = tmp_path / "file"
        door.file.touch()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            asking.send(b'{"pool": "raw", "volume": "a.b"}')
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert not is_open(door.file)
    door.file = Path()


async def test_a_device_that_opens_too_late_is_closed(
    one_file: tuple[OneFile, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, path = one_file
    monkeypatch.setattr(device_door, "TIMEOUT_S", 0.05)
    door.file, door.delay_s = tmp_path / "file", 0.2
    door.file.touch()
    assert await asked(path, "raw", REF.key) == "it does not answer"
    assert not is_open(door.file)
    door.file = Path()


@pytest.mark.parametrize("request_", [b"[" * 1024, b'{"pool": "\\ud800", "volume": ""}', b"1"])
async def test_a_request_that_makes_no_sense_is_refused(
    one_file: tuple[OneFile, Path], request_: bytes
) -> None:
    _, path = one_file
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(str(path))
        await loop.sock_sendall(asking, request_)
        assert (await loop.sock_recv(asking, 100)).startswith(b"-")


@pytest.mark.integration
async def test_a_device_that_a_vm_has_with_an_image_is_opened_by_its_path_and_no_other(
    tmp_path: Path, loop: str
) -> None:
    door = tmp_path / "devices.sock"
    (tmp_path / "disks").mkdir()
    link = tmp_path / "link"
    link.symlink_to("/dev/null")

    def opened(path: str) -> str:
        try:
            os.close(open_host_device(door, path))
        except OSError as error:
            return error.strerror or "closed"
        return ""

    wanted: set[str] = set()
    allowed = (loop, "/dev/null")
    served = DeviceDoor(door, tmp_path / "disks", {}, allowed, lambda: wanted)
    async with background() as tasks:
        tasks.start(served.serve())
        while not door.exists():
            await asyncio.sleep(0.01)
        assert f"no VM that this agent follows has the device {loop}" in await in_thread(
            lambda: opened(loop)
        )
        wanted |= {loop, str(link), "/dev/loop-control"}
        assert await in_thread(lambda: opened(loop)) == ""
        assert "is not among those" in await in_thread(lambda: opened("/dev/loop-control"))
        assert "is no block device" in await in_thread(lambda: opened(str(link)))
        assert "has nothing for" in await asked(door, "raw", REF.key)


async def test_the_content_of_a_volume_may_go_unless_a_vm_of_this_node_has_it(
    tmp_path: Path,
) -> None:
    path, ref = tmp_path / "devices.sock", REF.model_copy(update={"pool": "raw"})
    (tmp_path / "disks").mkdir()
    door = DeviceDoor(path, tmp_path / "disks", {"raw": pool("/dev/null")})
    vms = [record(name="web", volume_refs={"data": ref})]
    async with background() as tasks:
        tasks.start(door.serve(lambda: held_volumes(vms)))
        while not path.exists():
            await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="the VM web of this node has it"):
            await in_thread(lambda: refuse_used(path, "raw", ref.folder))
        await in_thread(lambda: refuse_used(path, "local", ref.folder))  # a move has left it there
        vms.clear()
        await in_thread(lambda: refuse_used(path, "raw", ref.folder))


@pytest.mark.integration
async def test_a_peer_that_hangs_up_or_sends_nonsense_ends_nothing(tmp_path: Path) -> None:
    door = tmp_path / "devices.sock"
    (tmp_path / "disks").mkdir()
    async with background() as tasks:
        serving = tasks.start(
            DeviceDoor(door, tmp_path / "disks", {"raw": pool("/dev/null")}).serve()
        )
        while not door.exists():
            await asyncio.sleep(0.01)
        for nonsense in (b"", b"{", b"7", b"[" * 1024, b'{"pool": {}}', SURROGATE):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(str(door))
                peer.sendall(nonsense)
        assert "nothing for" in await asked(door, "raw", "shop.other")
        assert not serving.done()


def test_imaged_has_the_devices_with_an_image_of_the_agents_vms_only() -> None:
    devices = [
        {"name": "root", "host_device": {"path": "/dev/dm-1", "image": "debian"}},
        {"name": "data", "host_device": {"path": "/dev/dm-2"}},
    ]
    with_devices = record(spec=ROOT_DISK | {"volumes": devices})
    assert devices_with_images([with_devices, record()]) == {"/dev/dm-1"}


@pytest.mark.integration
async def test_a_device_that_imaged_looks_at_is_opened_a_moment_later(loop: str) -> None:
    held = os.open(loop, os.O_RDWR | os.O_EXCL)
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(in_thread(lambda: open_exclusively(loop)))
        await asyncio.sleep(0.2)
        assert not opening.done()
        os.close(held)
    os.close(opening.result())
