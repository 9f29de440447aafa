"""imaged dies at each write of an export: no partial file is seen, and a repeat completes it."""

import gzip
from pathlib import Path

import pytest
from services.imaged.tests.records import empty, record
from services.imaged.tests.site_under_test import MIB, NodeMaker
from services.imaged.tests.test_exports import (
    CONTENT,
    ID,
    VM,
    Copies,
    ended,
    exporting,
    folder,
    work,
)
from services.imaged.tests.test_upload_crashes import MOST, Death, dying

from virtbus.imaged.edge.disk_threads import DiskThreads


@pytest.mark.parametrize("format_", ["qcow2", "raw.gz"])
@pytest.mark.parametrize("then", ["ensure", "cancel", "remove"])
async def test_a_crash_at_any_write_leaves_no_file_or_a_complete_one(
    make_node: NodeMaker, threads: DiskThreads, tmp_path: Path, format_: str, then: str
) -> None:
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            await node.disks.ensure(record(empty(8 * MIB), uid=VM))
            before = node.files.path(VM, "data").read_bytes()
            with dying(death):
                async with exporting(node, threads, Copies()) as exports:
                    await ended(exports, work(format=format_))
        async with make_node(state=state) as node, exporting(node, threads, Copies()) as exports:
            file = folder(node) / ID / f"disk.{format_}"
            whole = file.exists()
            assert not whole or _content(file) == CONTENT, f"partial after {last} writes"
            done = await ended(exports, work(then, format=format_))
            kept = then == "ensure" or (then == "cancel" and whole)
            assert (done.result is not None) == kept, f"after {last} writes"
            names = sorted(path.name for path in file.parent.glob("*"))
            assert names == ([file.name, "note.json"] if kept else []), f"after {last} writes"
            assert not kept or _content(file) == CONTENT
            assert node.files.path(VM, "data").read_bytes() == before
        if death.left >= 0:
            return  # it wrote no more than that
    pytest.fail(f"more than {MOST} writes")


def _content(file: Path) -> bytes:
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix == ".gz" else data
