"""Volumes are attached to, grown in and detached from real guests, on each bus that can."""

import asyncio
import json
import os
import select
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services.nodeagent.tests.libvirt_host import Host, folder, host

from virtbus.bus.runtime.image_locks import locked
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import assigned
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.metadata import disk_hashes
from virtbus.nodeagent.core.plugs import GuestDisks
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.nodeagent.vm.operations import plug
from virtbus.schemas.disk_buses import ABILITIES, Verb
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.node_rpc import ImageReady, MadeDisk
from virtbus.schemas.vm import (
    Devices,
    Disk,
    DiskBus,
    Domain,
    EmptyDisk,
    Memory,
    VmRecord,
    VmSpec,
    Volume,
)
from virtbus.schemas.volume_ref import NamedVolume, VolumeRef

__all__ = ["folder", "host"]  # fixtures

pytestmark = pytest.mark.integration

MIB = 2**20
HOT = [bus for bus in DiskBus if not ABILITIES[bus][Verb.HOT_PLUG].refused]
UID = "0192f0c1-2d3e-7abc-8def-0000000000f{}"


def wanted(*volumes: Disk, leaving: tuple[str, ...] = ()) -> VmSpec:
    """A guest with a USB controller and these volumes; `leaving` names are not in the spec."""
    own = (Disk(name="root"), Disk(name="stick", bus=DiskBus.USB))
    disks = (*own, *(one for one in volumes if one.name not in leaving))
    contents = [Volume(name=one.name, empty_disk=EmptyDisk(capacity=MIB)) for one in own]
    contents += [
        Volume(name=one.name, volume=NamedVolume(name=one.name)) for one in disks if one not in own
    ]
    domain = Domain(memory=Memory(guest=32 * MIB), devices=Devices(disks=disks))
    return VmSpec(domain=domain, volumes=tuple(contents))


@dataclass
class Guest:
    """A real guest, its volumes as files, and what the agent knows of its disks."""

    host: Host
    record: VmRecord
    known: GuestDisks = field(default_factory=GuestDisks)

    def path(self, name: str) -> Path:
        return self.host.folder / f"{self.record.uid}-{name}.qcow2"

    async def opened(self, _uid: str, ref: VolumeRef) -> bool:
        with self.path(ref.name).open("rb") as file:
            return locked(file.fileno())

    async def drop_media(self, uid: str, sources: object) -> None: ...

    async def sources(
        self, record: VmRecord, _made: object, *, running: bool = False
    ) -> dict[str, DiskSource]:
        return {
            name: DiskSource(str(self.path(name)), ImageFormat.QCOW2, volume=True)
            for name in record.volume_refs
        }

    def wants(self, *volumes: Disk, mib: int = 8, leaving: tuple[str, ...] = ()) -> None:
        """The record changes."""
        refs = {}
        for at, one in enumerate(volumes):
            path = self.path(one.name)
            if not path.exists():
                create = ["qemu-img", "create", "-q", "-f", "qcow2", str(path), "8M"]
                subprocess.run(create, check=True)
            refs[one.name] = VolumeRef(
                uid=UID.format(at), namespace="default", name=one.name, size_bytes=mib * MIB
            )
        update = {"spec": wanted(*volumes, leaving=leaving), "volume_refs": refs}
        self.record = self.record.model_copy(update=update)

    async def synced(self) -> dict[str, str]:
        """Run the agent's operation once; return what waits."""
        made = MadeDisk(virtual_size_bytes=MIB)
        ready = ImageReady(
            uid=self.record.uid,
            epoch=self.record.epoch,
            generation=self.record.generation,
            disks=dict.fromkeys(self.record.volume_refs, made),
        )
        plugs = self.host.hypervisor.devices
        tools = cast(
            "AgentPorts",
            SimpleNamespace(
                plugs=plugs,
                disks=self,
                logins=self.host.hypervisor.logins,
                settings=SimpleNamespace(ask_after_s=1.0),
            ),
        )
        image = Dependency(
            cast("Any", None), "imaged", ImageReady, lambda: self.record, lambda: None
        )
        image.receive(ready)
        self.known = await plug.change_disks(self.record, image, tools, self.known)
        return dict(self.known.pending)

    async def capacities(self) -> dict[str, int]:
        """Return QEMU's sizes of the volumes, by the names of their disks."""
        text = await asyncio.to_thread(
            subprocess.check_output,
            ["virsh", "qemu-monitor-command", f"vb-{self.record.uid}", "--hmp", "info block"],
            text=True,
        )
        names = [name for name in self.record.volume_refs if f"-{name}.qcow2" in text]
        return {name: size_of(self.path(name)) for name in names}

    async def monitor(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command to QEMU, and return its answer."""
        run = ["virsh", "qemu-monitor-command", f"vb-{self.record.uid}", json.dumps(command)]
        answer: dict[str, Any] = json.loads(await asyncio.to_thread(subprocess.check_output, run))
        return answer

    async def xml(self) -> str:
        run = ["virsh", "dumpxml", f"vb-{self.record.uid}"]
        return await asyncio.to_thread(subprocess.check_output, run, text=True)


def size_of(path: Path) -> int:
    info = ["qemu-img", "info", "-U", "--output=json", str(path)]
    text = subprocess.check_output(info, text=True)
    return int(text.split('"virtual-size": ')[1].split(",")[0])


@pytest.fixture
async def guest(host: Host) -> Guest:
    """A running guest without volumes. Its boot sector halts: it releases no PCI device."""
    record = host.record(wanted())
    await host.define(record)
    await host.hypervisor.start(record.uid)
    addresses = assigned(record.spec.domain)
    return Guest(host, record, GuestDisks(addresses, disk_hashes(record)))


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(40):
        while not await check():
            await asyncio.sleep(0.1)


async def test_volumes_are_attached_grown_and_detached_on_each_bus(guest: Guest) -> None:
    disks = [Disk(name=f"on-{bus}", bus=bus) for bus in HOT]
    guest.wants(*disks)
    assert await guest.synced() == {}
    assert await guest.capacities() == {one.name: 8 * MIB for one in disks}
    before = await guest.xml()
    assert await guest.synced() == {}, "a repeat changes nothing"
    assert await guest.xml() == before
    facts = await guest.host.hypervisor.facts(guest.record.uid)
    assert facts is not None
    assert facts.metadata is not None
    assert facts.metadata.addresses == guest.known.addresses, "an agent that restarts knows them"
    assert facts.metadata.disks == guest.known.hashes == disk_hashes(guest.record)

    guest.wants(*disks, mib=16)
    assert await guest.synced() == {}
    grows = {one.name for one in disks if not ABILITIES[one.bus][Verb.GROW].refused}
    assert await guest.capacities() == {
        one.name: (16 if one.name in grows else 8) * MIB for one in disks
    }

    names = tuple(one.name for one in disks)
    guest.wants(*disks, mib=16, leaving=names)
    waits = await guest.synced()
    assert waits == {"on-virtio": f"Detaching: {plug.BUSY}"}
    assert guest.known.detached == {"on-scsi", "on-usb"}
    await guest.host.hypervisor.reset(guest.record.uid)  # which ends a request that waits

    async def gone() -> bool:
        return await guest.synced() == {}

    await eventually(gone)
    assert guest.known.detached == set(names)
    assert await guest.capacities() == {}
    assert guest.known.hashes == {}


async def test_a_disk_keeps_its_address_when_others_leave_and_over_restarts(guest: Guest) -> None:
    disks = [Disk(name=name, bus=DiskBus.SCSI) for name in ("a", "b", "c")]
    guest.wants(*disks)
    assert await guest.synced() == {}
    units = guest.known.addresses["scsi"]
    guest.wants(*disks, leaving=("b",))
    assert await guest.synced() == {}
    left, hypervisor = [disks[0], disks[2]], guest.host.hypervisor
    guest.wants(*left)
    kept = assigned(guest.record.spec.domain, guest.known.addresses)
    assert kept["scsi"] == {name: units[name] for name in ("a", "c")}
    ports = kept["port"]
    assert ports == {name: guest.known.addresses["port"][name] for name in ports}
    guest.wants(*left, Disk(name="d", bus=DiskBus.SCSI))
    assert await guest.synced() == {}
    assert guest.known.addresses["scsi"] == {"a": 0, "c": 2, "d": 1}
    await hypervisor.destroy(guest.record.uid)


async def test_a_full_guest_says_so_and_takes_the_disk_on_another_bus(guest: Guest) -> None:
    many = [Disk(name=f"v{at}") for at in range(5)]
    guest.wants(*many)
    assert await guest.synced() == {"v4": f"Attaching: {plug.NO_PORT}"}
    guest.wants(*many[:4], Disk(name="s", bus=DiskBus.USB))
    assert await guest.synced() == {}


async def test_a_device_that_libvirt_does_not_know_is_replaced(guest: Guest) -> None:
    """QEMU has the device of a volume, as after a kill of libvirtd in an attach."""
    first, second = (Disk(name=name, bus=DiskBus.SCSI) for name in ("a", "b"))
    guest.wants(first)
    assert await guest.synced() == {}
    guest.wants(first, second)
    path = guest.path("b")
    path.chmod(0o666)
    file = {"driver": "file", "filename": str(path), "node-name": "libvirt-99-storage"}
    disk = {"driver": "qcow2", "file": file["node-name"], "node-name": "libvirt-99-format"}
    device = {"driver": "scsi-hd", "bus": "scsi0.0", "lun": 1, "drive": disk["node-name"]}
    for command, arguments in (
        ("blockdev-add", file),
        ("blockdev-add", disk),
        ("device_add", device | {"id": "ua-volume-b"}),
    ):
        answer = await guest.monitor({"execute": command, "arguments": arguments})
        assert "error" not in answer, answer

    async def settled() -> bool:
        return await guest.synced() == {}

    await eventually(settled)
    assert "ua-volume-b" in await guest.xml()
    assert set(await guest.capacities()) == {"a", "b"}


async def killed(pid: int) -> None:
    """Kill a process and wait for its end: only then its pid file is free for another process."""
    ended = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        readable, _, _ = await asyncio.to_thread(select.select, [ended], [], [], 20)
        assert readable, "the process has not ended"
    finally:
        os.close(ended)


async def test_a_disk_whose_attach_got_no_answer_is_a_disk_of_the_guest(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A libvirtd may attach a disk and be killed before it answers."""
    plugs = guest.host.hypervisor.devices
    attach = plugs.attach

    async def attach_unanswered(uid: str, devices: Sequence[str]) -> None:
        await attach(uid, devices)
        raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")

    disks = [Disk(name="s", bus=DiskBus.SCSI), Disk(name="v")]
    guest.wants(*disks)
    with monkeypatch.context() as broken:
        broken.setattr(plugs, "attach", attach_unanswered)
        assert set(await guest.synced()) == {"s", "v"}
    assert await guest.synced() == {}
    facts = await guest.host.hypervisor.facts(guest.record.uid)
    assert facts is not None
    assert facts.metadata is not None
    assert facts.metadata.addresses == guest.known.addresses
    assert guest.known.hashes == disk_hashes(guest.record)
    guest.wants(*disks, mib=16)
    assert await guest.synced() == {}
    assert await guest.capacities() == {"s": 16 * MIB, "v": 16 * MIB}


async def test_a_kill_of_libvirtd_at_any_moment_ends_with_the_disks_of_the_record(
    guest: Guest,
) -> None:
    """Each round changes the record and kills libvirtd while the agent works on it."""
    assert Path("/run/virtbus-box").exists(), "run it by tools/in-own-host"
    daemons = []
    disks = [Disk(name=f"s{at}", bus=DiskBus.SCSI) for at in range(3)]
    for turn, delay_s in enumerate((0.0, 0.02, 0.05, 0.1)):
        leaving = tuple(one.name for one in disks) if turn % 2 else ()
        guest.wants(*disks, leaving=leaving)
        async with asyncio.TaskGroup() as group:
            group.create_task(guest.synced())
            await asyncio.sleep(delay_s)
            await killed(int(Path("/run/libvirtd.pid").read_text()))
        daemon = await asyncio.create_subprocess_exec("libvirtd", start_new_session=True, cwd="/")
        daemons.append(daemon)

        async def settled() -> bool:
            return await guest.synced() == {}

        await eventually(settled)
        there = await guest.capacities()
        assert set(there) == (set() if leaving else {one.name for one in disks})
    assert all(one.returncode is None for one in daemons[-1:])
