"""A failed VM names the stage that failed, so that no program must know the reasons of others."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, record, uid

from virtbus.nodeagent.core.ports import DomainChange, Ending
from virtbus.nodeagent.vm.operations.outcome import backoff_s
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.simulator.services import SimulatedNode

A = uid(1)


def refused(*_of: object, **_more: object) -> None:
    raise VirtbusError(Code.INVALID, "broken", "it is broken", retry=Retry.NEVER)


async def failed(node: Node, stage: str) -> bool:
    status = await node.status(A)
    return status is not None and (status.failure_stage, bool(status.reason)) == (stage, True)


@pytest.mark.parametrize(("part", "stage"), [("image", "image"), ("net", "network")])
async def test_a_refusal_of_imaged_or_netd_is_of_their_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, stage: str
) -> None:
    monkeypatch.setattr(SimulatedNode, part, refused)
    node = Node(tmp_path)
    async with node.agent():
        await node.put(record())
        await eventually(lambda: failed(node, stage))


async def test_a_domain_that_cannot_start_is_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    monkeypatch.setattr(node.domains, "start", refused)
    async with node.agent():
        await node.put(record())
        await eventually(lambda: failed(node, "start"))


async def test_a_guest_that_crashes_fails_in_its_own_stage(tmp_path: Path) -> None:
    node = Node(tmp_path)
    async with node.agent():
        await node.put(record(spec={"run_strategy": "Manual"}))

        async def running() -> bool:
            return await node.state(A) == "Running"

        await eventually(running)
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await eventually(lambda: failed(node, "guest"))


def test_retries_never_become_rarer_than_one_a_minute() -> None:
    attempts = (1, 2, 6, 7, 1025, 10**9)
    assert [backoff_s(one) for one in attempts] == [1, 2, 32, 60, 60, 60]
