"""The reserve of the pool `local` bounds all new data of disks, not only that of volumes."""

import asyncio
from pathlib import Path

import pytest
from services.imaged.tests.records import UID, empty, record, uid
from services.imaged.tests.site_under_test import MIB
from services.imaged.tests.test_service import Desk, serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import Ensure, ExportWork, ImageReady, WorkState
from virtbus.schemas.snapshot import SnapshotDisk, SnapshotRef
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.wire import validate

SNAPSHOT = SnapshotWork(
    id=uid(7),
    uid=UID,
    epoch=1,
    name="web",
    snapshot=SnapshotRef(uid=uid(7), namespace="default", name="s"),
    disks=(SnapshotDisk(name="data"),),
)
EXPORT = ExportWork(id=uid(8), uid=UID, disk="data")


async def ended(desk: Desk, verb: str, work: SnapshotWork | ExportWork) -> str:
    """Return how a work ends: done, or the reason of its failure."""
    try:
        while (state := validate(WorkState, await desk.ask(verb, work)).state) == "working":
            await asyncio.sleep(0.02)
    except VirtbusError as error:
        return error.reason
    return state


@pytest.mark.parametrize("reserve", ["0", "1000000TiB"])
async def test_copies_and_growth_leave_the_reserve_of_local_free(
    tmp_path: Path, reserve: str
) -> None:
    pools = tmp_path / "pools.toml"
    pools.write_text(f'[pools.local]\nkind = "local"\nreserve = "{reserve}"\n', encoding="utf-8")
    full = reserve != "0"
    async with serving(tmp_path, MemoryServer(), pools_file=pools) as desk:
        await desk.put(record(empty(MIB)))
        assert (await desk.ready()).error is None
        for verb, work in (("snapshot", SNAPSHOT), ("export", EXPORT)):
            assert await ended(desk, verb, work) == ("disk_full" if full else "done"), verb
        larger = Ensure(record=record(empty(8 * MIB), generation=2))
        ready = validate(ImageReady, await desk.ask("ensure", larger))
        if full:
            assert ready.error is not None
            assert ready.error.reason == "disk_full"
        else:
            assert ready.disks["data"].virtual_size_bytes == 8 * MIB
