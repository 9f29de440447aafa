"""A full disk: guests wait and report the reason, and continue once there is space (F30)."""

import errno
import logging
import os
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainFacts, DomainState
from virtbus.nodeagent.edge import ledger, seed_iso

A = uid(1)


async def test_a_guest_that_waits_for_disk_space_is_reported_and_retried(tmp_path: Path) -> None:
    node = Node(tmp_path, compare_s=0.1)
    async with node.agent():
        await node.put(record())

        async def running() -> bool:
            return await node.state(A) == "Running"

        await eventually(running)
        node.domains.there[A] = DomainFacts(A, DomainState.PAUSED, waits_for_disk=True)
        node.domains.tell(DomainEvent(A, DomainChange.PAUSED))

        async def told() -> bool:
            status = await node.status(A)
            return status is not None and "is full or failing" in status.message

        await eventually(told)
        await eventually(running)
        assert ("resume", A) in node.domains.done

        async def well() -> bool:
            status = await node.status(A)
            return status is not None and not status.message

        await eventually(well)


async def test_a_guest_whose_server_is_away_says_so_at_once_and_runs_on(tmp_path: Path) -> None:
    node = Node(tmp_path, compare_s=60)
    ref = {"uid": uid(7), "namespace": "default", "name": "data", "size_bytes": 1}
    refs = {"data": {**ref, "pool": "san", "kind": "iscsi"}}

    async with node.agent() as agent:
        await node.put(record(volume_refs=refs))
        await eventually(in_state(node, "Running"))

        async def stalled() -> bool:
            status = await node.status(A)
            conditions = status.conditions if status else ()
            said = status is not None and "the server of the pool san" in status.message
            return said and any(one.type == "DiskStalled" for one in conditions)

        agent.servers.set("san", away=True)
        await eventually(stalled)
        assert await node.state(A) == "Running"
        agent.servers.set("san", away=False)

        async def well() -> bool:
            status = await node.status(A)
            return status is not None and not status.message

        await eventually(well)
    assert ("resume", A) not in node.domains.done


async def test_a_guest_that_somebody_paused_stays_paused(tmp_path: Path) -> None:
    node = Node(tmp_path, compare_s=0.05)
    async with node.agent():
        await node.put(record())

        async def in_state_running() -> bool:
            return await node.state(A) == "Running"

        await eventually(in_state_running)
        node.domains.set(A, DomainState.PAUSED)

        async def paused() -> bool:
            return await node.state(A) == "Paused"

        await eventually(paused)
    assert ("resume", A) not in node.domains.done


def no_room(*_of: object, **_more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_seed_that_does_not_fit_is_reported_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    drive = {"name": "seed", "cloud_init_no_cloud": {"hostname": "web"}}
    async with node.agent():
        monkeypatch.setattr(seed_iso, "replace", no_room)
        await node.put(record(spec={"volumes": [drive]}))

        async def told() -> bool:
            status = await node.status(A)
            return status is not None and status.reason == "state_write"

        await eventually(told)
        monkeypatch.undo()

        async def running() -> bool:
            return await node.state(A) == "Running"

        await eventually(running)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_a_delete_on_a_full_disk_ends_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        await node.start_another()
        monkeypatch.setattr(ledger.EpochLedger, "save", no_room)
        await node.put(record(99, deleting=True))

        async def told() -> bool:
            status = await node.status(uid(99))
            return status is not None and "free space" in status.message and not status.released

        await eventually(told)
        monkeypatch.undo()

        async def released() -> bool:
            status = await node.status(uid(99))
            return status is not None and status.released

        await eventually(released)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []
