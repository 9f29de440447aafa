"""Directories of guests on the real libvirtd, with real virtiofsd processes."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from services.nodeagent.tests.libvirt_host import HALTS, POWERS_OFF, Host, folder, heard, host

from virtbus.nodeagent.core.disk_sources import DiskSource, lent_name
from virtbus.nodeagent.core.ports import DomainChange
from virtbus.nodeagent.edge.shared_directories import HostDirectories
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.vm import Devices, Disk, Domain, Memory, VmRecord, VmSpec, Volume
from virtbus.schemas.volume_ref import HostDisk

__all__ = ["folder", "host"]  # fixtures

pytestmark = pytest.mark.integration


class Sharing:
    """A host with one directory that its VMs may mount."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.root = host.folder / "shared"
        allowed = {str(self.root): ("*",)}
        program_dir = host.folder / "libexec"
        self.directories = HostDirectories(host.folder / "run", program_dir, "n1", allowed)
        for name in ("www", "docs"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "marker").write_text(name)

    async def start(self, *shared: Filesystem) -> VmRecord:
        devices = Devices(filesystems=shared)
        spec = VmSpec(domain=Domain(memory=Memory(guest=32 * 2**20), devices=devices))
        record = self.host.record(spec)
        await self.host.define(record, shares=await self.directories.prepare(record))
        try:
            await self.host.hypervisor.start(record.uid)
        except VirtbusError as error:
            raise await self.directories.explained(record, error) from error
        return record

    def filesystem(self, name: str, *, readonly: bool = False) -> Filesystem:
        return Filesystem(name=name, directory=str(self.root / name), readonly=readonly)


def servers(host: Host) -> dict[int, str]:
    """Return the virtiofsd processes of a host's guests, with what is mounted at their root."""
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"/virtiofsd") and str(host.folder).encode() in b" ".join(words):
                found[int(path.name)] = (path / "mountinfo").read_text()
        except OSError:
            continue
    return found


def until_gone(host: Host) -> None:
    deadline = time.monotonic() + 20
    while servers(host):
        assert time.monotonic() < deadline, servers(host)
        time.sleep(0.1)


async def test_virtiofsd_serves_exactly_the_directory_and_ends_with_the_guest(host: Host) -> None:
    made = Sharing(host)
    record = await made.start(made.filesystem("www"), made.filesystem("docs", readonly=True))
    roots = {}
    for pid, mounts in servers(host).items():
        marker = Path(f"/proc/{pid}/root/marker")
        if marker.exists():  # the other process of a pair waits, outside
            (root,) = (line for line in mounts.splitlines() if line.split()[4] == "/")
            roots[marker.read_text()] = root.split()[5].split(",")
    assert set(roots) == {"www", "docs"}
    assert {"rw", "nosuid", "nodev"} <= set(roots["www"])
    assert {"ro", "nosuid", "nodev"} <= set(roots["docs"])
    assert await made.directories.lost(record) == ()
    assert str(made.root) not in Path("/proc/self/mountinfo").read_text()

    await host.hypervisor.destroy(record.uid)
    until_gone(host)


async def test_a_virtiofsd_that_dies_is_found(host: Host) -> None:
    made = Sharing(host)
    record = await made.start(made.filesystem("www"), made.filesystem("docs", readonly=True))
    for pid in [pid for pid, root in servers(host).items() if "/www" in root]:
        with contextlib.suppress(ProcessLookupError):  # one of a pair ends with the other
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while await made.directories.lost(record) != ("www",):
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def test_a_directory_of_another_guest_or_behind_a_link_is_refused_with_the_reason(
    host: Host,
) -> None:
    made = Sharing(host)
    first = await made.start(made.filesystem("www"), made.filesystem("docs", readonly=True))
    with pytest.raises(VirtbusError, match=f"the VM {first.uid} has .*/www") as caught:
        await made.start(made.filesystem("www"))
    assert (caught.value.code, caught.value.reason) == (Code.CONFLICT, "directory_refused")
    (made.root / "away").symlink_to("/etc")
    with pytest.raises(VirtbusError, match="links are not followed"):
        await made.start(made.filesystem("away"))
    await made.start(made.filesystem("docs", readonly=True))

    await host.hypervisor.destroy(first.uid)
    await made.start(made.filesystem("www"))


async def test_a_file_of_the_node_is_a_disk_of_one_guest_and_keeps_its_owner(host: Host) -> None:
    made = Sharing(host)
    path = made.root / "disk.img"
    path.write_bytes((POWERS_OFF.ljust(510, b"\0") + b"\x55\xaa").ljust(2**20, b"\0"))
    path.chmod(0o600)
    halting = made.root / "halting.img"
    halting.write_bytes((HALTS.ljust(510, b"\0") + b"\x55\xaa").ljust(2**20, b"\0"))

    async def start(file: Path) -> VmRecord:
        volume = Volume(name="data", host_disk=HostDisk(path=str(file)))
        devices = Devices(disks=(Disk(name="data", boot_order=1),))
        domain = Domain(memory=Memory(guest=32 * 2**20), devices=devices)
        record = host.record(VmSpec(domain=domain, volumes=(volume,)))
        lent = DiskSource(lent_name("data"), ImageFormat.RAW, lent=True)
        await host.define(record, disks={"data": lent})
        async with made.directories.disks(record) as files:
            await host.hypervisor.start(record.uid, files=files)
        return record

    async with host.hypervisor.events() as events:
        record = await start(path)
        await heard(events, record.uid, DomainChange.SHUT_DOWN)
    first = await start(halting)
    with pytest.raises(VirtbusError, match="another process using the image"):
        await start(halting)
    await host.hypervisor.destroy(first.uid)
    assert [os.stat(one).st_uid for one in (path, halting)] == [0, 0]
    assert oct(path.stat().st_mode & 0o777) == "0o600"
