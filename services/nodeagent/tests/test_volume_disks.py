"""The disk of a volume: the agent derives its path, and no VM keeps it after its release."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import record
from services.nodeagent.tests.test_disk_files import DIGEST, qcow2

from virtbus.nodeagent.core.disk_sources import disk_sources
from virtbus.nodeagent.core.domain_xml import default_order
from virtbus.nodeagent.edge.disk_files import HostDiskFiles
from virtbus.nodeagent.edge.disk_pins import drop_pins
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

A, B = (f"0192f0c1-2d3e-7abc-8def-00000000000{n}" for n in "ab")
VOLUME = "0192f0c1-2d3e-7abc-8def-0123456789cc"
MADE = {"data": MadeDisk(virtual_size_bytes=2**20)}
SPEC = {
    "domain": {"devices": {"disks": [{"name": "data"}]}},
    "volumes": [{"name": "data", "volume": {"name": "data-1"}}],
}


def ref(image: str = "") -> VolumeRef:
    return VolumeRef(uid=VOLUME, namespace="shop", name="data-1", size_bytes=2**20, image=image)


def holding(uid: str = A, image: str = "", **more: Any) -> VmRecord:
    refs = {"volume_refs": {"data": ref(image)}} | more
    return record(uid=uid, spec=SPEC).model_copy(update=refs)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disks" / "volumes" / f"shop.data-1.{VOLUME}" / "disk.qcow2"
    path.parent.mkdir(parents=True)
    path.write_bytes(qcow2())
    for uid in (A, B):
        (tmp_path / "vms" / uid).mkdir(parents=True)
    return path


async def test_libvirt_gets_a_name_of_the_volume_in_the_vms_folder(
    tmp_path: Path, disk: Path
) -> None:
    source = (await HostDiskFiles(tmp_path).sources(holding(), MADE))["data"]
    assert source.path == str(tmp_path / "vms" / A / "disk-data.qcow2")
    assert Path(source.path).samefile(disk)


async def test_a_volume_that_another_vm_still_has_is_refused(tmp_path: Path, disk: Path) -> None:
    files = HostDiskFiles(tmp_path)
    first = (await files.sources(holding(A), MADE))["data"]
    with pytest.raises(VirtbusError, match="2 names"):
        await files.sources(holding(B), MADE)
    Path(first.path).unlink()  # the release of the first VM
    assert (await files.sources(holding(B), MADE))["data"].path.startswith(
        str(tmp_path / "vms" / B)
    )


async def test_a_link_in_place_of_the_volumes_folder_is_refused(tmp_path: Path, disk: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    disk.parent.rename(elsewhere)
    disk.parent.symlink_to(elsewhere)
    with pytest.raises(VirtbusError) as refused:
        await HostDiskFiles(tmp_path).sources(holding(), MADE)
    assert refused.value.reason == "disk_refused"


@pytest.mark.parametrize(
    ("of", "made"),
    [
        (holding(volume_refs={}), MADE),
        (holding(image="tiny"), MADE),
        (
            holding(),
            {"data": MadeDisk(virtual_size_bytes=1, digest=DIGEST, image_format=ImageFormat.RAW)},
        ),
        (holding(), {}),
    ],
    ids=["unknown", "no image", "another image", "not made"],
)
def test_a_report_that_contradicts_the_record_is_refused(
    tmp_path: Path, of: VmRecord, made: dict[str, MadeDisk]
) -> None:
    with pytest.raises(VirtbusError) as refused:
        disk_sources(tmp_path, of, made)
    assert refused.value.reason == "disk_refused"


def test_a_vm_boots_from_its_first_volume_with_an_image() -> None:
    assert default_order(holding(image="tiny")) == {"data": 1}
    assert default_order(holding()) == {}


def test_a_volume_is_no_disk_of_the_vms_own() -> None:
    assert holding().spec.local_disks == ()


async def test_a_detached_volume_loses_the_name_in_the_folder_of_its_vm(
    tmp_path: Path, disk: Path
) -> None:
    files = HostDiskFiles(tmp_path)
    pin = Path((await files.sources(holding(A), MADE))["data"].path)
    drop_pins(tmp_path, holding(A), running=True)
    assert pin.exists()
    drop_pins(tmp_path, holding(A, spec=record().spec, volume_refs={}), running=True)
    assert not pin.exists()
    assert (await files.sources(holding(B), MADE))["data"].path.startswith(
        str(tmp_path / "vms" / B)
    )


async def test_another_volume_under_the_name_of_a_disk_takes_its_place(
    tmp_path: Path, disk: Path
) -> None:
    pin = Path((await HostDiskFiles(tmp_path).sources(holding(A), MADE))["data"].path)
    other = {"data": ref().model_copy(update={"uid": B})}
    drop_pins(tmp_path, holding(A, volume_refs=other), running=True)
    assert not pin.exists()


# --- shared volumes ----------------------------------------------------------------------------
SHARED = {"data": ref().model_copy(update={"shared": True})}
QEMU_PROCESS = """
import sys
held = open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def raw(disk: Path) -> Path:
    """The file of a shared volume: its guests wrote what looks like a qcow2 file there."""
    path = disk.with_name("disk.raw")
    path.write_bytes(qcow2(backing="/etc/shadow"))
    disk.unlink()
    return path


async def test_each_vm_has_its_own_name_of_a_shared_volume(tmp_path: Path, raw: Path) -> None:
    files = HostDiskFiles(tmp_path)
    for uid in (A, B, A):
        source = (await files.sources(holding(uid, volume_refs=SHARED), MADE))["data"]
        assert source.path == str(tmp_path / "vms" / uid / "disk-data.raw")
        assert (source.format, source.shared) == (ImageFormat.RAW, True)
        assert Path(source.path).samefile(raw)
    assert raw.stat().st_nlink == 3
    drop_pins(tmp_path, holding(A, spec=record().spec, volume_refs={}), running=True)
    assert raw.stat().st_nlink == 2
    (tmp_path / "foreign").hardlink_to(raw)
    with pytest.raises(VirtbusError, match="3 names instead of 2"):
        await files.sources(holding(A, volume_refs=SHARED), MADE)


async def test_only_the_vms_own_qemu_keeps_it_from_giving_up_a_shared_volume(
    tmp_path: Path, raw: Path
) -> None:
    files = HostDiskFiles(tmp_path)
    arguments = ("-c", QEMU_PROCESS, str(raw), "-name", f"guest=vb-{A},debug", "-uuid", A)
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        assert await files.opened(A, SHARED["data"])
        assert not await files.opened(B, SHARED["data"])
        assert process.stdin is not None
        process.stdin.close()
    assert not await files.opened(A, SHARED["data"])
    os.unlink(raw)
    assert not await files.opened(A, SHARED["data"])


async def test_the_last_name_of_a_file_is_never_removed(tmp_path: Path, disk: Path) -> None:
    pin = Path((await HostDiskFiles(tmp_path).sources(holding(A), MADE))["data"].path)
    disk.unlink()
    drop_pins(tmp_path, holding(A, spec=record().spec, volume_refs={}), running=True)
    assert pin.exists()
