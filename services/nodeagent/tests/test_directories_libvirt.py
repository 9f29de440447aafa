"""Directories of guests on the real libvirtd, with real virtiofsd processes."""

import os
import signal
import time
from pathlib import Path

import pytest
from services.nodeagent.tests.libvirt_host import Host, folder, host

from virtbus.nodeagent.edge.shared_directories import HostDirectories
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.vm import Devices, Domain, Memory, VmRecord, VmSpec

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
