"""reset, soft-reboot, freeze and thaw over the API: the node's answer is the request's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.errors import BusError
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.vm_api import VmApi
from virtbus.schemas import subjects
from virtbus.schemas.api import Empty
from virtbus.schemas.errors import Code, Retry, VirtbusError


@asynccontextmanager
async def agent(made: World, answer: Any = None, verb: str = "command") -> AsyncIterator[list[Any]]:
    """The agent of the VM's node, and its received requests."""
    asked: list[Any] = []

    async def do(request: Request) -> Any:
        asked.append(request.data)
        if isinstance(answer, Exception):
            raise answer
        return Empty()

    stored = await made.stored(uid(1))
    assert stored is not None
    endpoint = Endpoint(f"agent-{verb}", subjects.rpc(stored.node, "agent", verb), do)
    async with made.host.serve(ServiceInfo("virtbus-nodeagent", "0"), [endpoint]):
        yield asked


@played()
async def test_a_command_succeeds_once_its_node_confirms_it(made: World) -> None:
    one = await made.vm("create", name="web", image="tiny", uid=uid(1))
    async with agent(made) as asked:
        after = await made.vm("reset", name="web", epoch=one.epoch)
        await made.vm("soft-reboot", uid=uid(1))
    assert after.revision == one.revision
    assert [one["verb"] for one in asked] == ["reset", "soft-reboot"]
    assert {(one["uid"], one["epoch"]) for one in asked} == {(uid(1), 1)}
    assert len({one["id"] for one in asked}) == 2


@played()
async def test_a_repeated_request_bears_the_same_id_to_the_node(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    subject = subjects.api("vm", "reset")
    async with agent(made) as asked:
        for _ in range(2):
            await made.client.request(subject, {"name": "web"}, timeout_s=10, request_id="mine")
    assert [one["id"] for one in asked] == ["mine", "mine"]


@played()
async def test_a_refusal_of_the_node_is_passed_on(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    refusal = VirtbusError(Code.CONFLICT, "not_running", "web is not running")
    async with agent(made, refusal):
        error = await refused(made.ask("reset", name="web"))
    assert (error.code, error.reason) == (409, "not_running")


@played()
async def test_a_vm_without_a_current_status_does_not_run(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    refusal = VirtbusError(Code.NOT_FOUND, "vm_not_here", "it is not here")
    async with agent(made, refusal):
        error = await refused(made.ask("reset", name="web"))
    assert (error.code, error.reason) == (409, "not_running")


@played()
async def test_a_vm_that_was_moved_since_is_left_unchanged(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    async with agent(made) as asked:
        error = await refused(made.ask("reset", name="web", epoch=2))
    assert (error.code, error.reason) == (409, "moved")
    assert asked == []


@played()
async def test_a_node_that_does_not_answer_has_done_nothing(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    error = await refused(made.ask("reset", name="web"))
    assert (error.code, error.reason) == (503, "node_silent")
    assert error.body.retry is Retry.SAME_ID


@played()
async def test_a_freeze_and_a_thaw_reach_the_node_with_their_time_limit(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    async with agent(made, verb="freeze") as asked:
        await made.vm("freeze", name="web", timeout_s=30, epoch=1)
        await made.vm("freeze", name="web")
        await made.vm("thaw", name="web")
        assert (await refused(made.ask("freeze", name="web", epoch=2))).reason == "moved"
        assert (await refused(made.ask("freeze", name="web", timeout_s=0))).reason == "invalid"
    assert [(one["epoch"], one["timeout_s"]) for one in asked] == [(1, 30), (1, 300), (1, 0)]


@played()
async def test_no_command_acts_after_the_time_limit_of_its_request(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    find = VmApi.find

    async def slow_find(api: VmApi, *asked: Any) -> StoredVm:
        found = await find(api, *asked)
        await asyncio.sleep(6)
        return found

    async with agent(made) as asked:
        with patch.object(VmApi, "find", slow_find), pytest.raises((VirtbusError, BusError)):
            await made.client.request(subjects.api("vm", "reset"), {"name": "web"}, timeout_s=5)
        await asyncio.sleep(10)
    assert asked == []
