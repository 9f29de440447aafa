"""A merge of layers concerns the own and local disks of a VM; the QEMU of a running one does it."""

from collections.abc import Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_live_snapshots import Guest, Running
from services.nodeagent.tests.test_operations import VM, Machine, Site

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_layers import GuestLayers, files_below
from virtbus.nodeagent.live_merges import LiveMerges
from virtbus.nodeagent.operation_rules import flatten_work
from virtbus.nodeagent.operation_runner import LiveWork, OperationRunner
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.wire import validate


@dataclass
class MergedGuest(Guest):
    """The ports of `Guest`, whose QEMU copies layers."""

    below: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)

    async def look(self, _uid: str) -> GuestLayers | None:
        return GuestLayers(dict(self.used), dict(self.named), dict(self.below))

    async def pull(self, _uid: str, target: str, base: str) -> None:
        assert target not in self.pulls
        self.pulls[target] = base

    async def pulled(self, _uid: str, target: str) -> tuple[int, int] | None:
        return (1, 5) if target in self.pulls else None

    async def end_pulls(self, _uid: str, targets: Collection[str]) -> None:
        for target in targets:
            self.pulls.pop(target, None)


class FlattenSite(Site):
    """A runner, and imaged, which needs two requests for a merge."""

    def __init__(self) -> None:
        self.guest = MergedGuest()
        self.merges: list[FlattenWork] = []
        self.error: VirtbusError | None = None
        super().__init__()

    def restart(self) -> None:
        tools = SimpleNamespace(layers=self.guest)
        live = LiveWork(merges=LiveMerges(cast("AgentPorts", tools)))
        states: Any = lambda: self.vms.values()  # noqa: E731
        self.runner = OperationRunner(self.bus, NODE, states, lambda: True, live)
        self.runner.list_begins()
        for entry in self.records.values():
            self.runner.take(entry)
        self.runner.list_ends()

    async def merge(self, request: Request) -> WorkState:
        want = validate(FlattenWork, request.data)
        if self.error is not None:
            raise self.error
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


async def test_the_guests_own_qemu_merges_the_layers_of_a_running_vm(site: FlattenSite) -> None:
    site.vms = {VM: Running()}
    site.guest.below = {"vda": ("/x/layers/a", "/x/layers/b", "/images/data/i"), "sda": ()}
    async with site.merging():
        assert (await site.status()).step == "merge"
        assert (site.guest.pulls, site.merges[0].live) == ({"vda": "/images/data/i"}, True)
        await site.runner.round()
        site.restart()  # another agent continues
        await site.runner.round()
        assert (await site.status()).phase == "Running"
        site.guest.below, site.guest.pulls = {"vda": ("/images/data/i",)}, {}
        await site.runner.round()
        assert (await site.status()).phase == "Succeeded"


async def test_a_cancel_or_a_full_disk_ends_the_copies(site: FlattenSite) -> None:
    site.vms = {VM: Running()}
    site.guest.below = {"vda": ("/x/layers/a",), "sda": ("/x/layers/b",)}
    async with site.merging():
        assert site.guest.pulls == {"vda": "", "sda": ""}
        site.error = VirtbusError(Code.UNAVAILABLE, "disk_full", "below the floor")
        await site.runner.round()
        status = await site.status()
    assert status.error is not None
    assert (status.error.reason, site.guest.pulls) == ("disk_full", {})


async def test_libvirt_that_does_not_know_the_files_is_refused(site: FlattenSite) -> None:
    site.vms = {VM: Running()}
    site.guest.named["vda"] = "/old"
    async with site.merging():
        status = await site.status()
    assert status.error is not None
    assert (status.error.reason, site.merges) == ("layers_differ", [])


def test_the_files_below_a_disk_are_those_of_libvirts_xml() -> None:
    xml = """<domain><devices><disk><source file="/top"/><backingStore type="file">
      <source file="/x/layers/a"/><backingStore type="file"><source file="/image"/><backingStore/>
      </backingStore></backingStore><target dev="vda"/></disk>
      <disk><target dev="sda"/></disk></devices></domain>"""
    assert files_below(xml) == {"vda": ("/x/layers/a", "/image"), "sda": ()}


def test_media_and_disks_elsewhere_are_left_out() -> None:
    vm: Any = Running()
    op = OperationRecord(
        id=uid(10), kind="flatten", node=NODE, namespace="default", resource="vm", uid=VM,
        name="web", epoch=1, created_ns=1,
    )  # fmt: skip
    names = [disk.name for disk in flatten_work(op, "ensure", [vm]).disks]
    assert names == ["root", "data"]
