"""Guests of one boot sector on the real libvirtd, for tests of the hypervisor."""

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.domain_xml import DomainInputs, render
from virtbus.nodeagent.core.ports import DomainChange, DomainEvent
from virtbus.nodeagent.core.shares import NO_SHARES, Shares
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.nodeagent.edge.seed_iso import SeedIsos
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.vm import (
    Devices,
    Disk,
    Domain,
    ImageVolume,
    Interface,
    Memory,
    VmRecord,
    VmSecrets,
    VmSpec,
    Volume,
)

URI = "qemu:///system"
QEMU = "/usr/bin/qemu-system-x86_64"
HALTS = bytes([0xFA, 0xF4, 0xEB, 0xFD])
"""cli; hlt; jmp: a guest that does nothing."""
# The serial port echoes its input (in al,dx of LSR; test; in; out; jmp).
ECHOES = bytes(
    [0xBA, 0xFD, 0x03, 0xEC, 0xA8, 0x01, 0x74, 0xFB, 0xBA, 0xF8, 0x03, 0xEC, 0xEE, 0xEB, 0xF1]
)
READS_FW_CFG = bytes.fromhex(
    "BB2000 BA1005 89D8 EF B93000 BA1105 EC BAF803 EE E2F6 43 81FB6000 75E6 FAF4EBFD"
)
"""Writes 48 bytes of each fw_cfg entry from 0x20 to 0x5f to the serial port, then halts."""
POWERS_OFF = bytes([0xBA, 0x04, 0x06, 0xB8, 0x00, 0x20, 0xEF, 0xF4])
"""mov dx,0x604; mov ax,0x2000; out dx,ax: soft-off by q35's ACPI port."""
SLEEPS = bytes([0xBA, 0x04, 0x06, 0xB8, 0x00, 0x24, 0xEF, 0xF4])
"""mov dx,0x604; mov ax,0x2400; out dx,ax: suspend to RAM."""


@dataclass
class Host:
    """A state folder that QEMU's user may traverse, and the real libvirtd."""

    hypervisor: LibvirtHypervisor
    files: AgentFiles
    folder: Path
    uids: list[str]

    def spec(self) -> VmSpec:
        return VmSpec(
            domain=Domain(
                memory=Memory(guest=32 * 2**20),
                devices=Devices(disks=(Disk(name="root"),), interfaces=(Interface(name="a"),)),
            ),
            volumes=(Volume(name="root", image=ImageVolume(ref="tiny")),),
        )

    def record(self, spec: VmSpec | None = None) -> VmRecord:
        uid = str(uuid.uuid4())
        self.uids.append(uid)
        return VmRecord(
            uid=uid,
            namespace="default",
            name="edge",
            spec=spec or self.spec(),
            spec_hash="0" * 64,
            node="n1",
            created_ns=1,
        )

    def path(self, record: VmRecord, name: str) -> Path:
        return self.folder / f"{record.uid}-{name}.img"

    def disk(self, record: VmRecord, name: str, code: bytes) -> DiskSource:
        path = self.path(record, name)
        path.write_bytes((code.ljust(510, b"\0") + b"\x55\xaa").ljust(2**20, b"\0"))
        path.chmod(0o600)
        return DiskSource(path=str(path), format=ImageFormat.RAW)

    async def define(
        self,
        record: VmRecord,
        code: bytes = HALTS,
        emulator: str = QEMU,
        codes: Mapping[str, bytes] | None = None,
        shares: Shares = NO_SHARES,
        disks: Mapping[str, DiskSource] | None = None,
    ) -> None:
        """Define a domain; `codes` has other boot sectors, by disk."""
        await self.files.write(record)
        names = [v.name for v in record.spec.volumes if v.cloud_init_no_cloud is None]
        seeds = SeedIsos(self.files.vms)
        await seeds.write(record, VmSecrets(uid=record.uid, ignition=record.spec.ignition), ())
        await self.hypervisor.define(
            render(
                DomainInputs(
                    record=record,
                    disks=disks
                    or {
                        name: self.disk(record, name, (codes or {}).get(name, code))
                        for name in names
                    },
                    seeds=seeds.paths(record),
                    shares=shares,
                    ignition=seeds.ignition_path(record),
                    console_socket=self.files.console_socket(record.uid),
                    console_log=self.files.console_log(record.uid),
                    accelerator="tcg",
                    emulator=emulator,
                )
            )
        )


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for socket paths, and open to QEMU's user, which pytest's tmp_path is not."""
    path = Path(tempfile.mkdtemp(prefix="vb-edge-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[Host]:
    files = AgentFiles(folder / "state", folder / "run")
    files.open("n1")
    async with LibvirtHypervisor(URI, starts_at_once=4) as hypervisor:
        made = Host(hypervisor, files, folder, [])
        try:
            yield made
        finally:
            for uid in made.uids:
                await hypervisor.destroy(uid)
                await hypervisor.undefine(uid)
            files.close()


async def heard(events: AsyncIterator[DomainEvent], uid: str, change: DomainChange) -> None:
    async with asyncio.timeout(30):
        async for event in events:
            if (event.uid, event.change) == (uid, change):
                return


def pid_of(uid: str) -> int:
    """Return the process id of a guest's QEMU."""
    return int(Path(f"/run/libvirt/qemu/vb-{uid}.pid").read_text())
