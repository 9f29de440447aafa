"""A disk that takes seconds for each sync: the node stays alive to others (F29)."""

import os
import time
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.schemas import subjects

SYNC_S = 1.5


async def test_a_node_whose_disk_hangs_goes_on_saying_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    revisions: list[int] = []
    async with node.agent():
        real = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(SYNC_S)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", slow)
        monkeypatch.setattr(os, "fdatasync", slow)
        begun = time.monotonic()
        for number in range(1, 9):  # more than there are threads
            await node.put(record(number))

        async def beats() -> bool:
            entry = await node.bus.get(subjects.node_record(NODE))
            if entry is not None and entry.revision not in revisions:
                revisions.append(entry.revision)
            return len(revisions) >= 10

        await eventually(beats)
        assert time.monotonic() - begun < SYNC_S
        assert ("start", uid(1)) not in node.domains.done
        monkeypatch.undo()
