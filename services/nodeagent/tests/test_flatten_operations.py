"""A merge of layers concerns the own and local disks of a VM that is off."""

from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_live_snapshots import Running
from services.nodeagent.tests.test_operations import VM, Machine, Site

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.nodeagent.operation_rules import flatten_work
from virtbus.schemas import subjects
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.wire import validate


class FlattenSite(Site):
    """A runner, and imaged, which needs two requests for a merge."""

    def __init__(self) -> None:
        super().__init__()
        self.merges: list[FlattenWork] = []

    async def merge(self, request: Request) -> WorkState:
        want = validate(FlattenWork, request.data)
        self.merges.append(want)
        if want.do == "cancel":
            return WorkState(state="none")
        return WorkState(state="working" if len(self.merges) == 1 else "done", step="merge")

    @asynccontextmanager
    async def merging(self, **more: Any) -> Any:
        endpoint = Endpoint("flatten", subjects.rpc(NODE, "imaged", "flatten"), self.merge)
        async with self.bus.serve(ServiceInfo("virtbus-imaged", "1"), [endpoint]):
            await self.put(**({"kind": "flatten", "disk": ""} | more))
            await self.runner.round()
            yield


@pytest.fixture
def site() -> FlattenSite:
    return FlattenSite()


async def test_a_merge_begins_and_succeeds(site: FlattenSite) -> None:
    async with site.merging():
        assert (await site.status()).step == "merge"
        await site.runner.round()
        assert (await site.status()).phase == "Succeeded"
    assert all(one.may_begin for one in site.merges)


async def test_a_start_of_the_vm_waits_and_a_cancel_ends_the_wait(site: FlattenSite) -> None:
    async with site.merging():
        site.vms[VM] = Machine(phase="preparing", powered=True)
        await site.runner.round()
        assert not site.merges[-1].may_begin  # only a merge that has begun continues
        site.restart()
        await site.put(kind="flatten", disk="", cancel=True)
        await site.runner.round()
        assert (await site.status()).phase in {"Cancelled", "Succeeded"}


async def test_a_running_vm_is_refused(site: FlattenSite) -> None:
    site.vms = {VM: Running()}
    async with site.merging():
        status = await site.status()
    assert status.error is not None
    assert (status.error.reason, site.merges) == ("vm_runs", [])


def test_media_and_disks_elsewhere_are_left_out() -> None:
    vm: Any = Running()
    op = OperationRecord(
        id=uid(10), kind="flatten", node=NODE, namespace="default", resource="vm", uid=VM,
        name="web", epoch=1, created_ns=1,
    )  # fmt: skip
    names = [disk.name for disk in flatten_work(op, "ensure", [vm]).disks]
    assert names == ["root", "data"]
