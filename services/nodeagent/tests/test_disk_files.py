"""A hostile imaged: with any report or file of it, libvirt gets no other file.

imaged owns `disks/` and `images/`. libvirt is root and changes the owner of files in the XML.
"""

import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from services.nodeagent.tests.pretended_node import record

from virtbus.nodeagent.core.disk_sources import disk_sources
from virtbus.nodeagent.edge.disk_files import HostDiskFiles
from virtbus.nodeagent.edge.disk_pins import drop_pins
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.node_rpc import ImageReady, MadeDisk
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import DevicePattern, VolumeRef
from virtbus.schemas.wire import validate

DIGEST = "sha256:" + "5e" * 32
ROOT_DISK = {"domain": {"devices": {"disks": [{"name": "root"}]}}}
WANTED = record(spec=ROOT_DISK | {"volumes": [{"name": "root", "image": {"ref": "tiny"}}]})
EMPTY = record(spec=ROOT_DISK | {"volumes": [{"name": "root", "empty_disk": {"capacity": 2**20}}]})
MADE = {"root": MadeDisk(virtual_size_bytes=2**20, digest=DIGEST, image_format=ImageFormat.QCOW2)}


def qcow2(backing: str = "", *, says: str = "qcow2", features: int = 0, crypt: int = 0) -> bytes:
    """The start of a qcow2 v3 file (QEMU docs/interop/qcow2.txt)."""
    extensions = struct.pack(">II", 0xE2792ACA, len(says)) + says.encode().ljust(8, b"\0")
    extensions += struct.pack(">II", 0, 0)
    at = 112 + len(extensions) if backing else 0
    head = struct.pack(
        ">4sIQIIQIIQQIIQ QQQII 8x", b"QFI\xfb", 3, at, len(backing), 16, 2**20, crypt,
        1, 3 << 16, 1 << 16, 1, 0, 0, features, 0, 0, 4, 112,
    )  # fmt: skip
    return (head + extensions + backing.encode()).ljust(2**16, b"\0")


class Host:
    """A state folder as imaged and the agent leave it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.secret = state / "shadow"
        self.secret.write_text("root:secret")
        self.image = state / "images" / "data" / DIGEST.removeprefix("sha256:")
        self.disk = state / "disks" / WANTED.uid / "root.qcow2"
        self.pin = state / "vms" / WANTED.uid / "disk-root.qcow2"
        for path in (self.image, self.disk, self.pin):
            path.parent.mkdir(parents=True)
        self.image.write_bytes(qcow2())
        self.disk.write_bytes(qcow2(str(self.image)))
        self.files = HostDiskFiles(state)

    async def path(self, made: dict[str, MadeDisk] = MADE, of: VmRecord = WANTED) -> str:
        return (await self.files.sources(of, made))["root"].path


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_libvirt_gets_a_name_of_the_disk_that_imaged_cannot_change(host: Host) -> None:
    source = (await host.files.sources(WANTED, MADE))["root"]
    assert source.path == str(host.pin)
    assert host.pin.samefile(host.disk)
    assert source.backing_path == str(host.image)
    host.disk.unlink()  # by imaged, between the agent's check and libvirt's
    host.disk.symlink_to(host.secret)
    assert not host.pin.is_symlink()
    assert host.pin.read_bytes() != host.secret.read_bytes()


async def test_a_disk_is_taken_at_each_start_and_after_it_was_restored(host: Host) -> None:
    assert await host.path() == await host.path() == str(host.pin)
    restored = host.disk.with_name("restored")
    restored.write_bytes(qcow2(str(host.image)) + b"of a backup")
    restored.rename(host.disk)
    assert await host.path() == str(host.pin)
    assert host.pin.read_bytes().endswith(b"of a backup")
    host.disk.write_bytes(qcow2())
    made = {"root": MadeDisk(virtual_size_bytes=2**20)}
    assert await host.path(made, EMPTY) == str(host.pin)


def with_device(path: str) -> VmRecord:
    """Return a VM with a device of the node as its disk."""
    return record(spec=ROOT_DISK | {"volumes": [{"name": "root", "host_device": {"path": path}}]})


async def test_only_allowed_block_devices_become_disks(tmp_path: Path) -> None:
    allowed = HostDiskFiles(tmp_path, devices_allowed=("/dev/null", "/dev/no-such-*"))
    for files, path, why in (
        (HostDiskFiles(tmp_path), "/dev/null", "devices_allowed"),
        (allowed, "/dev/zero", "devices_allowed"),
        (allowed, "/dev/no-such-one", "devices_allowed"),
        (allowed, "/dev/null", "no block device"),
    ):
        with pytest.raises(VirtbusError, match=why):
            await files.sources(with_device(path), {})


@pytest.mark.integration
async def test_a_device_is_given_with_its_size_unless_the_host_uses_it(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(2**20))
    shown = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, check=True
    )
    device = shown.stdout.strip()
    try:
        files = HostDiskFiles(tmp_path, devices_allowed=("/dev/loop*",))
        source = (await files.sources(with_device(device), {}))["root"]
        assert (source.path, source.device_bytes, source.is_file) == (device, 2**20, False)
        holder = os.open(device, os.O_RDONLY | os.O_EXCL)  # as a mount does
        try:
            with pytest.raises(VirtbusError, match="cannot be opened"):
                await files.sources(with_device(device), {})
        finally:
            os.close(holder)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def _symlink(path: str) -> Callable[[Host], None]:
    def do(host: Host) -> None:
        target: Path = getattr(host, path)
        target.unlink()
        target.symlink_to(host.secret)

    return do


def _folder_link(host: Host) -> None:
    elsewhere = host.state / "elsewhere"
    host.disk.parent.rename(elsewhere)
    host.disk.parent.symlink_to(elsewhere)


def _data_link(host: Host) -> None:
    elsewhere = host.state / "elsewhere"
    host.image.parent.rename(elsewhere)
    host.image.parent.symlink_to(elsewhere)


def _hard_link(path: str) -> Callable[[Host], None]:
    def do(host: Host) -> None:
        target: Path = getattr(host, path)
        (host.state / "foreign").write_bytes(target.read_bytes())
        target.unlink()
        target.hardlink_to(host.state / "foreign")

    return do


def _second_name(host: Host) -> None:
    """Of another file with the pinned name: the pin does not repair it."""
    host.pin.write_bytes(b"old")
    os.link(host.disk, host.state / "foreign")


def _folder(host: Host) -> None:
    host.disk.unlink()
    host.disk.mkdir()


def _fifo(host: Host) -> None:
    host.disk.unlink()
    os.mkfifo(host.disk)


def _device(host: Host) -> None:
    host.disk.unlink()
    host.disk.symlink_to("/dev/null")


def _header(**more: Any) -> Callable[[Host], object]:
    return lambda host: host.disk.write_bytes(qcow2(str(host.image), **more))


def _disk(data: bytes) -> Callable[[Host], object]:
    return lambda host: host.disk.write_bytes(data)


def _backing(name: str) -> Callable[[Host], object]:
    return _disk(qcow2(name))


def _image(data: bytes) -> Callable[[Host], object]:
    return lambda host: host.image.write_bytes(data)


HOSTILE: dict[str, Callable[[Host], object]] = {
    "the disk is a symlink": _symlink("disk"),
    "the image is a symlink": _symlink("image"),
    "the folder is a symlink": _folder_link,
    "the store's folder is a symlink": _data_link,
    "the disk is a hard link": _hard_link("disk"),
    "the image is a hard link": _hard_link("image"),
    "the disk has a second name": _second_name,
    "the disk is a directory": _folder,
    "the disk is a FIFO": _fifo,
    "the disk is a device": _device,
    "the disk is raw": _disk(b"x" * 2**16),
    "the disk is short": _disk(b"QFI\xfb"),
    "another backing file": _backing("/etc/shadow"),
    "another image": _backing("/var/lib/virtbus/images/data/" + "ab" * 32),
    "a backing protocol": _backing("nbd://127.0.0.1/x"),
    "a backing name by json": _backing('json:{"driver":"file"}'),
    "no backing file": _backing(""),
    "another backing format": _header(says="vmdk"),
    "an external data file": _header(features=4),
    "an unknown feature": _header(features=1 << 40),
    "encrypted": _header(crypt=2),
    "the image has a backing file": _image(qcow2("/etc/shadow")),
    "the image has a data file": _image(qcow2(features=4)),
    "the image is no qcow2": _image(b"x" * 2**16),
    "there is no disk": lambda host: host.disk.unlink(),
    "there is no image": lambda host: host.image.unlink(),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_file_other_than_the_vms_own_disk_is_refused(host: Host, what: str) -> None:
    HOSTILE[what](host)
    with pytest.raises(VirtbusError) as caught:
        await host.path()
    assert caught.value.reason == "disk_refused"
    assert not host.pin.is_symlink()
    assert host.secret.stat().st_nlink == 1


@pytest.mark.parametrize("digest", ["", "sha256:../../../etc/shadow", "/etc/shadow", "sha256:5e"])
def test_imaged_names_an_image_by_its_digest_only(digest: str) -> None:
    said = {"virtual_size_bytes": 1, "digest": digest, "image_format": "raw"}
    told = {"uid": WANTED.uid, "epoch": 1, "disks": {"root": said}}
    with pytest.raises(VirtbusError) as caught:
        disk_sources(Path("/s"), WANTED, validate(ImageReady, told).disks)
    assert caught.value.reason in {"invalid", "disk_refused"}


def test_no_path_from_imaged_is_used() -> None:
    said = {"path": "/etc/shadow", "format": "raw", "virtual_size_bytes": 1}
    told = {"uid": WANTED.uid, "epoch": 1, "disks": {"root": said, "more": said}}
    sources = disk_sources(Path("/s"), EMPTY, validate(ImageReady, told).disks)
    assert {source.path for source in sources.values()} == {f"/s/disks/{WANTED.uid}/root.qcow2"}


def test_a_disk_that_imaged_omitted_is_named() -> None:
    with pytest.raises(VirtbusError, match="volume root is refused: imaged did not make it"):
        disk_sources(Path("/s"), WANTED, {})


async def test_another_medium_of_a_drive_has_another_name_until_the_drive_has_it(
    host: Host,
) -> None:
    drive = {"name": "root", "bus": "sata", "device": "cdrom"}
    spec = {"domain": {"devices": {"disks": [drive]}}}
    of = record(spec=spec | {"volumes": [{"name": "root", "image": {"ref": "tiny"}}]})
    first = await host.path(of=of)
    assert Path(first).name == "disk-root.5e5e5e5e5e5e.qcow2"
    digest = "sha256:" + "6f" * 32
    image = host.image.with_name(digest.removeprefix("sha256:"))
    image.write_bytes(qcow2())
    replaced = host.disk.with_name("replaced")
    replaced.write_bytes(qcow2(str(image)))
    replaced.rename(host.disk)
    made = MadeDisk(virtual_size_bytes=2**20, digest=digest, image_format=ImageFormat.QCOW2)
    sources = await host.files.sources(of, {"root": made})
    assert Path(sources["root"].path).name == "disk-root.6f6f6f6f6f6f.qcow2"
    assert Path(first).exists(), "the guest may lock the tray"
    await host.files.drop_media(of.uid, sources)
    assert not Path(first).exists()
    assert Path(sources["root"].path).samefile(host.disk)
    drop_pins(host.state, of, running=True)
    assert Path(sources["root"].path).exists()


def test_a_volume_that_went_to_another_pool_keeps_no_second_name_in_the_former(host: Host) -> None:
    ref = VolumeRef(uid=WANTED.uid, namespace="default", name="data", size_bytes=2**20)
    of = WANTED.model_copy(update={"volume_refs": {"data": ref}})
    former = host.state / "disks" / "volumes" / ref.folder / "disk.qcow2"
    former.parent.mkdir(parents=True)
    pin = host.pin.with_name("disk-data.qcow2")
    linked(former, pin)
    drop_pins(host.state, of, running=True)
    assert pin.exists()
    moved = ref.model_copy(update={"pool": "fast"})
    drop_pins(host.state, of.model_copy(update={"volume_refs": {"data": moved}}), running=True)
    assert not pin.exists()
    assert former.stat().st_nlink == 1


def linked(path: Path, other: Path) -> None:
    path.write_bytes(qcow2())
    os.link(path, other)


async def test_qemu_writes_a_backup_to_no_file_but_an_empty_one_of_imaged(tmp_path: Path) -> None:
    host, backup = Host(tmp_path), "0192f0c1-2d3e-7abc-8def-00000000000a"
    staged = tmp_path / "disks" / "backups" / backup / "root.qcow2"
    staged.parent.mkdir(parents=True)
    cases: dict[str, Callable[[], object]] = {
        "symlink": lambda: staged.symlink_to(host.secret),
        "second name": lambda: linked(staged, tmp_path / "other"),
        "backing file": lambda: staged.write_bytes(qcow2(str(host.secret), says="raw")),
        "no image": lambda: staged.write_bytes(b"x" * 4096),
        "fifo": lambda: os.mkfifo(staged),
        "absent": lambda: None,
    }
    for make in cases.values():
        staged.unlink(missing_ok=True)
        make()
        with pytest.raises(VirtbusError):
            await host.files.pin_backup(WANTED.uid, "root", backup)
    staged.unlink(missing_ok=True)
    staged.write_bytes(qcow2())
    pin = Path(await host.files.pin_backup(WANTED.uid, "root", backup))
    assert (pin.parent, pin.samefile(staged)) == (host.pin.parent, True)
    assert await host.files.backup_pins() == {(WANTED.uid, backup)}
    again = await host.files.pin_backup(WANTED.uid, "root", backup)
    assert again == str(pin)
    await host.files.unpin_backup(WANTED.uid, backup)
    assert not pin.exists()
    assert staged.stat().st_mode & 0o777 == 0o444
    (pin.parent / "backup-foreign.root.qcow2").write_text("")
    assert await host.files.backup_pins() == set()


def test_a_pattern_of_devices_is_one_that_can_be_searched(tmp_path: Path) -> None:
    devices: TypeAdapter[str] = TypeAdapter(DevicePattern)
    for good in ("/dev/loop*", "/dev/*", "/dev/vg0/pvc-*", "/dev/disk/by-id/*a?[12]", "/dev/*.x"):
        assert list(tmp_path.glob(devices.validate_python(good).removeprefix("/dev/"))) == []
    for bad in ("/dev//x", "/dev/", "/dev/.", "/dev/../x", "/dev/a**b", "/dev/**", "/dev/x/", "/x"):
        with pytest.raises(ValidationError):
            devices.validate_python(bad)
