"""Slow user data delays only its own VM's seed (ADR 0029)."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.nodeagent.core import seed
from virtbus.nodeagent.edge import seed_iso
from virtbus.schemas.vm import VmRecord

LARGE = "#cloud-config\n" + "#" * seed_iso.SMALL_BYTES
MANY = 28
"""As many as the simulated host has room for; an executor of asyncio has CPUs + 4 threads."""


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Large user data is read endlessly; set once it began."""
    began, go_on = threading.Event(), threading.Event()
    real = seed.seed_files

    def endless(of: VmRecord, given: Any, *more: Any) -> Mapping[str, bytes]:
        if given.user_data == LARGE:
            began.set()
            go_on.wait(20)
        return real(of, given, *more)

    monkeypatch.setattr(seed_iso, "seed_files", endless)
    yield began
    go_on.set()


def seeded(number: int, user_data: str | None) -> VmRecord:
    drive = {"name": "seed", "cloud_init_no_cloud": {"user_data": user_data}}
    return record(number, spec={"volumes": [drive]})


async def test_a_delete_does_not_wait_for_user_data_that_is_still_read(
    tmp_path: Path, reading: threading.Event
) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        await node.put(seeded(1, LARGE))
        await eventually(reading.is_set)
        await node.put(seeded(1, LARGE).model_copy(update={"deleting": True}))

        async def released() -> bool:
            status = await node.status(uid(1))
            return status is not None and status.released

        await eventually(released)
        assert list(node.files.vms.iterdir()) == []


async def test_many_that_are_still_read_keep_no_other_vm_waiting(
    tmp_path: Path, reading: threading.Event
) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        for number in range(1, MANY + 1):
            await node.put(seeded(number, LARGE))
        await eventually(reading.is_set)
        await node.put(record(90))
        await node.put(seeded(91, "#cloud-config\nruncmd: [ls]\n"))
        for other in (90, 91):
            await eventually(in_state(node, "Running", uid(other)))
        assert await node.state(uid(1)) != "Running"
