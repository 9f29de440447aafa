"""Snapshots on a node: imaged gets the VM's disks, and begins only while no guest has them."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_operations import VM, Machine, Site

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

REF = {"uid": uid(7), "namespace": "default", "name": "data-1", "size_bytes": 5}
TAKEN = {"uid": uid(10), "namespace": "default", "name": "s"}
SPEC = {
    "volumes": [
        {"name": "root", "image": {"ref": "tiny"}},
        {"name": "data", "volume": {"name": "data-1"}},
        {"name": "seed", "cloud_init_no_cloud": {"user_data": "#cloud-config\n"}},
    ]
}


class Disks(Machine):
    """A VM with its own disk, a volume and a seed."""

    @property
    def record(self) -> VmRecord:
        fields = super().record.model_dump() | {"spec": SPEC, "volume_refs": {"data": REF}}
        return VmRecord.model_validate(fields)


@dataclass
class Imaged:
    """imaged's snapshots: each is done at the second request."""

    asked: list[SnapshotWork] = field(default_factory=list)

    async def answer(self, request: Request) -> WorkState:
        want = validate(SnapshotWork, request.data)
        self.asked.append(want)
        if want.do == "cancel":
            return WorkState(state="none")
        if len(self.asked) == 1:
            return WorkState(state="working", step="copy", done_bytes=1, total_bytes=5)
        return WorkState(state="done", done_bytes=5, total_bytes=5)

    def serving(self, site: Site) -> Any:
        endpoint = Endpoint("snapshot", subjects.rpc(NODE, "imaged", "snapshot"), self.answer)
        return site.bus.serve(ServiceInfo("virtbus-imaged", "1"), [endpoint])


@pytest.fixture
def site() -> Site:
    made = Site()
    made.vms = {VM: Disks()}
    return made


async def put(site: Site, **more: Any) -> OperationRecord:
    return await site.put(kind="snapshot", disk="", snapshot=TAKEN, **more)


async def test_a_snapshot_has_all_disks_of_the_vm(site: Site) -> None:
    imaged = Imaged()
    async with imaged.serving(site):
        await put(site)
        for _ in range(2):
            await site.runner.round()
        status = await site.status()
        assert (status.phase, status.result, status.done_bytes) == ("Succeeded", None, 5)
        first = imaged.asked[0]
        named = [(disk.name, disk.ref.name if disk.ref else "") for disk in first.disks]
        assert named == [("root", ""), ("data", "data-1")]
        assert (first.uid, first.name, first.snapshot.uid) == (VM, "web", uid(10))
        assert first.may_begin


async def test_a_snapshot_of_a_volume_needs_that_no_guest_has_it(site: Site) -> None:
    imaged = Imaged()
    of = {"resource": "volume", "uid": uid(7), "name": "data-1", "ref": REF}
    async with imaged.serving(site):
        site.vms[VM].phase, site.vms[VM].powered = "starting", True
        await put(site, **of)
        await site.runner.round()
        status = await site.status()
        assert status.error is not None
        assert (status.error.reason, imaged.asked) == ("volume_in_use", [])


async def test_work_that_imaged_lost_does_not_begin_again_under_a_guest(site: Site) -> None:
    imaged = Imaged()
    async with imaged.serving(site):
        await put(site)
        await site.runner.round()
        site.vms[VM].phase, site.vms[VM].powered = "preparing", True
        await site.runner.round()
        assert [want.may_begin for want in imaged.asked] == [True, False]


async def test_work_continues_only_when_the_agent_knows_its_vms(site: Site) -> None:
    imaged = Imaged()
    async with imaged.serving(site):
        await put(site)
        await site.runner.round()
        site.vms[VM].phase = "new"
        await site.runner.round()
        assert len(imaged.asked) == 1
        site.vms[VM].deleting = True
        await site.runner.round()
        assert (imaged.asked[-1].do, await site.phases(10)) == ("cancel", ["Cancelled"])
