"""Two real guests have one shared file on each bus, and each has it without a host's cache."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.libvirt_host import HALTS, Host, folder, host
from services.nodeagent.tests.test_pool_sizes_libvirt import exporting

from virtbus.bus.runtime.pool_settings import NbdPool
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.network_disks import NetworkDisk
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.pool import PoolKind
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

__all__ = ["folder", "host"]  # fixtures

pytestmark = pytest.mark.integration


async def block_nodes(uid: str) -> dict[str, Any]:
    """Return the block nodes that a guest's QEMU may write, by file."""
    ask = json.dumps({"execute": "query-named-block-nodes", "arguments": {"flat": True}})
    run = ["virsh", "qemu-monitor-command", f"vb-{uid}", ask]
    text = await asyncio.to_thread(subprocess.check_output, run, text=True)
    return {one["file"]: one for one in json.loads(text)["return"] if not one["ro"]}


async def both(host: Host, spec: VmSpec, files: dict[str, DiskSource]) -> list[VmRecord]:
    """Start two guests with these disks."""
    records = [host.record(spec) for _ in range(2)]
    for record in records:
        await host.define(record, disks=files)
        await host.hypervisor.start(record.uid)
    return records


async def test_two_guests_have_one_place_on_a_server(host: Host, tmp_path: Path) -> None:
    spec = VmSpec(
        domain=Domain(memory=Memory(guest=32 * 2**20), devices=Devices(disks=(Disk(name="a"),))),
        volumes=(Volume(name="a", empty_disk=EmptyDisk(capacity=2**20)),),
    )
    async with exporting(tmp_path, 2**20) as port:
        pool = NbdPool(kind=PoolKind.NBD, host="127.0.0.1", port=port)
        network = NetworkDisk(pool, "one")
        files = {"a": DiskSource("", ImageFormat.RAW, shared=True, network=network)}
        for record in await both(host, spec, files):
            (node,) = (await block_nodes(record.uid)).values()
            assert (node["drv"], node["cache"]["direct"]) == ("nbd", True), node


async def test_two_guests_have_one_file_on_each_bus(host: Host) -> None:
    disks = tuple(Disk(name=f"on-{bus}", bus=bus) for bus in DiskBus)
    spec = VmSpec(
        domain=Domain(memory=Memory(guest=32 * 2**20), devices=Devices(disks=disks)),
        volumes=tuple(Volume(name=one.name, empty_disk=EmptyDisk(capacity=2**20)) for one in disks),
    )
    files: dict[str, DiskSource] = {}
    for one in disks:
        path = host.folder / f"{one.name}.raw"
        path.write_bytes((HALTS.ljust(510, b"\0") + b"\x55\xaa").ljust(2**20, b"\0"))
        files[one.name] = DiskSource(str(path), ImageFormat.RAW, shared=True)
    records = await both(host, spec, files)
    for record in records:
        nodes = await block_nodes(record.uid)
        assert set(nodes) == {one.path for one in files.values()}
        assert all(one["cache"]["direct"] for one in nodes.values()), nodes
    owners = {host.folder.joinpath(one.path).stat().st_uid for one in files.values()}
    await host.hypervisor.destroy(records[0].uid)
    after = {host.folder.joinpath(one.path).stat().st_uid for one in files.values()}
    assert after == owners, "the end of one guest takes no file from the other"
