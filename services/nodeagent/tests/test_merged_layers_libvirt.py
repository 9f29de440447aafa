"""The QEMU of a running guest merges the files below a disk, on the real libvirtd (ADR 0080)."""

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import libvirt
import pytest
from services.nodeagent.tests.libvirt_host import URI, Host, folder, host

from virtbus.nodeagent.core.disk_sources import DATA, IMAGES, DiskSource
from virtbus.nodeagent.edge import qemu_monitor
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.vm import VmRecord

__all__ = ["folder", "host"]  # fixtures

pytestmark = pytest.mark.integration


def overlay(path: Path, below: Path | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rests = ["-b", str(below), "-F", "qcow2"] if below is not None else []
    command = ["qemu-img", "create", "-q", "-f", "qcow2", *rests, str(path)]
    subprocess.run([*command, *([] if below else ["4M"])], check=True)


def backing(path: Path) -> str:
    command = ["qemu-img", "info", "-U", str(path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (line.partition(": ") for line in told.splitlines())
    return next((value for name, _, value in lines if name == "backing file"), "")


async def switched(host: Host) -> tuple[VmRecord, Path, Path, Path]:
    """Start a guest, and let it continue in a new file; return the new, its former and the image.

    QEMU knows the former file by another name than the header of the new one.
    """
    record = host.record()
    image, pin = host.folder / IMAGES / DATA / "i", host.folder / "disk-root.qcow2"
    layer, new = host.folder / "layers" / "s.root.qcow2", host.folder / "layer-root.qcow2"
    overlay(image, None)
    overlay(pin, image)
    subprocess.run(["qemu-io", "-c", "write -P 7 0 2M", pin], check=True, capture_output=True)
    for place in (host.folder / IMAGES, image.parent):
        place.chmod(0o711)
    image.chmod(0o444)
    source = DiskSource(str(pin), backing_path=str(image), backing_format=ImageFormat.QCOW2)
    await host.define(record, disks={"root": source})
    layer.parent.mkdir()
    layer.parent.chmod(0o711)
    layer.hardlink_to(pin)
    await host.hypervisor.start(record.uid)
    overlay(new, layer)
    await host.hypervisor.layers.switch(record.uid, {"vda": str(new)})
    return record, new, pin, image


async def test_the_layers_below_a_disk_are_those_of_qemu_and_a_pull_ends_at_the_image(
    host: Host,
) -> None:
    record, new, pin, image = await switched(host)
    layers, uid = host.hypervisor.layers, record.uid
    seen = await layers.look(uid)
    assert seen is not None
    assert (seen.layers("vda"), seen.image("vda")) == ((str(pin),), str(image))
    assert seen.used_below == {str(new): (str(pin), str(image))}
    assert seen.inodes == {str(new): new.stat().st_ino}
    await layers.pull(uid, "vda", seen.image("vda"))
    while await layers.pulls(uid):
        await asyncio.sleep(0.01)
    seen = await layers.look(uid)
    assert seen is not None
    assert seen.layers("vda") == ()
    assert seen.below["vda"] == seen.used_below[str(new)] == (str(image),)
    assert backing(new) == str(image)


def has_files(process: int) -> bool:
    """Return True until each thread of a killed process has closed its files, and so its locks."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
        return True
    return any(stat.rpartition(") ")[2][:1] not in {"Z", "X"} for stat in stats)


async def test_a_guest_that_is_killed_right_after_a_pull_has_all_its_content(host: Host) -> None:
    record, new, pin, image = await switched(host)
    layers, uid = host.hypervisor.layers, record.uid
    process = int(Path(f"/run/libvirt/qemu/vb-{uid}.pid").read_text())
    await layers.pull(uid, "vda", str(image))
    while backing(new) != str(image):
        await layers.pulls(uid)
    os.kill(process, signal.SIGKILL)
    while has_files(process):
        await asyncio.sleep(0.01)
    subprocess.run(["qemu-img", "compare", "-q", pin, new], check=True)


async def test_a_copy_that_waits_for_its_end_can_be_ended_and_leaves_the_layers(
    host: Host,
) -> None:
    record, new, pin, image = await switched(host)
    layers, uid, before = host.hypervisor.layers, record.uid, backing(new)
    await layers.pull(uid, "vda", str(image))
    with contextlib.closing(libvirt.open(URI)) as connection:
        domain = connection.lookupByUUIDString(uid)
        while not qemu_monitor.copies(domain)["vda"].whole:
            await asyncio.sleep(0.01)
    await layers.end_pulls(uid)
    assert await layers.pulls(uid) == {}
    seen = await layers.look(uid)
    assert seen is not None
    assert (seen.layers("vda"), backing(new)) == ((str(pin),), before)


async def test_a_pull_that_runs_can_be_ended_and_leaves_the_layers(host: Host) -> None:
    record, new, pin, image = await switched(host)
    layers, uid = host.hypervisor.layers, record.uid
    before = backing(new)
    await layers.end_pulls(uid)  # there is none
    with contextlib.closing(libvirt.open(URI)) as connection:
        slow = connection.lookupByUUIDString(uid)
        slow.blockRebase("vda", str(image), 1, 0)  # MiB/s
        assert set(await layers.pulls(uid)) == {"vda"}
        await layers.end_pulls(uid)
        assert await layers.pulls(uid) == {}
    seen = await layers.look(uid)
    assert seen is not None
    assert (seen.layers("vda"), backing(new)) == ((str(pin),), before)
