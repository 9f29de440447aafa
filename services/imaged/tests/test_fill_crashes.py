"""imaged dies at each write of a fill: nothing partial is seen, and the fill is repeated."""

import contextlib
from pathlib import Path

import pytest
from services.imaged.tests.filling import (
    AT,
    CONTENT,
    Copies,
    ended,
    filling,
    folder,
    names,
    work,
)
from services.imaged.tests.records import named, record, ref, uid
from services.imaged.tests.site_under_test import MIB, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_upload_crashes import Death

from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.schemas.errors import VirtbusError

MOST = 200


@pytest.mark.parametrize("source", ["image", "volume"])
@pytest.mark.parametrize("then", ["ensure", "cancel", "release"])
async def test_a_crash_at_any_write_leaves_nothing_partial(
    make_node: NodeMaker,
    threads: DiskThreads,
    server: Web,
    tmp_path: Path,
    source: str,
    then: str,
) -> None:
    server.files["a"] = qcow2_image(payload=64 * 1024)
    from_volume = ref(16 * MIB, name="data-2").model_copy(update={"uid": uid(78)})
    of = ref(0).model_copy(update={"copied": True})
    fields = {"image": server.url("a")} if source == "image" else {"volume": from_volume}
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            if source == "volume":
                vm = record(named(), uid=uid(1), refs={"data": from_volume})
                await node.disks.ensure(vm)
            with death.reigning():
                async with filling(node, threads, Copies()) as fills:
                    with contextlib.suppress(VirtbusError):
                        await ended(fills, work(of, **fields))
        async with make_node(state=state) as node, filling(node, threads, Copies()) as fills:
            whole = "disk.qcow2" in names(node, of)
            if whole:
                content = (folder(node, of) / "disk.qcow2").read_bytes()
                assert content[AT : AT + len(CONTENT)] == CONTENT, f"after {last} writes"
            else:
                vm = record(named(), uid=uid(2), refs={"data": of})
                with pytest.raises(VirtbusError, match="no content yet"):
                    await node.disks.ensure(vm)
            if then == "release":
                await node.disks.release_volume(of)
                assert names(node, of) == []
            else:
                ended_as = await ended(fills, work(of, then, **fields))
                kept = whole or then == "ensure"
                assert (ended_as.state == "done") == kept
                assert names(node, of) == (["disk.qcow2", "record.json"] if kept else [])
            assert then != "ensure" or node.parts() == [], f"left after {last} writes"
        if death.left >= 0:
            return  # it wrote no more than that
    pytest.fail(f"more than {MOST} writes")
