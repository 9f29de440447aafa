"""A merge of layers concerns the own and local disks of a VM; the QEMU of a running one does it."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_live_snapshots import REF, Guest, Running
from services.nodeagent.tests.test_operations import VM, Machine, Site

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_layers import GuestLayers, files_below
from virtbus.nodeagent.edge.libvirt_layers import NoLayers
from virtbus.nodeagent.live_merges import LiveMerges
from virtbus.nodeagent.operation_rules import flatten_work
from virtbus.nodeagent.operation_runner import LiveWork, OperationRunner
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationRecord
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

IMAGE = "/state/images/data/i"
PIN, LAYER = "/state/vms/web/disk-root.qcow2", "/state/disks/layers/a.root.qcow2"
INODES = {"/root": 11, "/data": 12}


@dataclass
class MergedGuest(Guest):
    """The ports of `Guest`, whose QEMU copies layers."""

    below: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The files below each disk, by target, as libvirt says."""
    qemu: dict[str, tuple[str, ...]] | None = None
    """The same as QEMU says; None: as libvirt says."""
    running: dict[str, str] = field(default_factory=dict)
    """The base of each copy that runs."""
    begun: list[tuple[str, str]] = field(default_factory=list)
    late: bool = False
    """True: disks are attached after QEMU's answer, and before that of libvirt."""
    stuck: bool = False
    """True: no copy can be ended."""

    async def look(self, _uid: str) -> GuestLayers | None:
        if not self.up:
            return None
        qemu = self.below if self.qemu is None else self.qemu
        if self.late:
            self.late = False
            return GuestLayers({}, dict(self.named))
        used = {self.named[target]: files for target, files in qemu.items()}
        return GuestLayers(dict(self.used), dict(self.named), dict(self.below), used, INODES)

    async def pull(self, _uid: str, target: str, base: str) -> None:
        assert target not in self.running
        self.begun.append((target, base))
        self.running[target] = base

    async def pulls(self, _uid: str) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.running, (1, 5))

    async def end_pulls(self, _uid: str) -> None:
        if self.stuck:
            raise VirtbusError(Code.INTERNAL, "libvirt_failed", "no")
        self.running.clear()

    def end(self, target: str) -> None:
        """The copy of a disk has ended."""
        base = self.running.pop(target)
        self.below[target] = (base,) if base else ()


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
        if self.error is not None and not want.merged:
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

    async def failed(self) -> str:
        """The reason of the failure."""
        error = (await self.status()).error
        assert error is not None
        return error.reason

    @property
    def merged(self) -> dict[str, int]:
        """The disks that imaged knows as merged."""
        return {name: inode for one in self.merges for name, inode in one.merged.items()}


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


@pytest.fixture
def live() -> FlattenSite:
    """A VM that runs, with a layer below its first disk."""
    site = FlattenSite()
    site.vms = {VM: Running()}
    site.guest.below = {"vda": (LAYER, IMAGE), "sda": ()}
    return site


async def test_the_guests_own_qemu_merges_the_layers_of_a_running_vm(live: FlattenSite) -> None:
    async with live.merging():
        assert (await live.status()).step == "merge"
        assert (live.guest.running, live.merges[-1].live) == ({"vda": IMAGE}, True)
        await live.runner.round()
        live.restart()  # another agent continues
        await live.runner.round()
        assert (await live.status()).phase == "Running"
        live.guest.end("vda")
        await live.runner.round()
        status = await live.status()
    assert (status.phase, status.message) == ("Succeeded", "")
    assert live.guest.begun == [("vda", IMAGE)]


@pytest.mark.parametrize("below", [(PIN,), (PIN, LAYER)], ids=["once", "on a layer"])
async def test_a_file_that_a_snapshot_froze_is_a_layer_by_the_agents_name_as_well(
    live: FlattenSite, below: tuple[str, ...]
) -> None:
    """Until the next start QEMU knows the former file of a disk by the agent's name."""
    live.guest.below["vda"] = (*below, IMAGE)
    live.guest.below["sda"] = ("/state/vms/web/disk-data.qcow2",)
    async with live.merging():
        assert live.guest.begun == [("vda", IMAGE), ("sda", "")]
        for target in ("vda", "sda"):
            live.guest.end(target)
        await live.runner.round()
        assert (await live.status()).phase == "Succeeded"


async def test_imaged_learns_which_disks_are_merged_as_soon_as_each_is(live: FlattenSite) -> None:
    live.guest.below["sda"] = ("/state/disks/layers/b",)
    async with live.merging():
        assert live.merged == {}
        live.guest.end("sda")
        await live.runner.round()
        assert live.merged == {"data": INODES["/data"]}
        live.guest.end("vda")
        await live.runner.round()
    assert live.merged == {"root": INODES["/root"], "data": INODES["/data"]}
    assert all(set(one.merged) == {disk.name for disk in one.disks} for one in live.merges[2:3])


async def test_the_space_is_checked_for_all_layers_before_the_first_copy(live: FlattenSite) -> None:
    async with live.merging():
        await live.runner.round()
        checks = [one for one in live.merges if not one.merged]
    assert [one.whole for one in checks] == [True, False]
    assert [disk.name for disk in checks[0].disks] == ["root"]


async def test_a_disk_without_room_begins_no_copy(live: FlattenSite) -> None:
    live.error = VirtbusError(Code.UNAVAILABLE, "disk_full", "below the floor")
    async with live.merging():
        assert (await live.failed(), live.guest.begun) == ("disk_full", [])


async def test_a_full_disk_ends_the_copies(live: FlattenSite) -> None:
    live.guest.below["sda"] = ("/state/disks/layers/b",)
    async with live.merging():
        assert live.guest.running == {"vda": IMAGE, "sda": ""}
        live.error = VirtbusError(Code.UNAVAILABLE, "disk_full", "below the floor")
        await live.runner.round()
        assert (await live.failed(), live.guest.running) == ("disk_full", {})


async def test_one_running_vm_is_merged_at_a_time(live: FlattenSite) -> None:
    other = uid(2)
    second: Any = Running()
    live.vms[other] = SimpleNamespace(
        record=second.record.model_copy(update={"uid": other}),
        phase="running",
        ends=False,
        observed=second.observed,
        image=second.image,
    )  # type: ignore[assignment]
    async with live.merging():
        await live.put(number=11, kind="flatten", disk="", uid=other)
        await live.runner.round()
        assert live.guest.begun == [("vda", IMAGE)]
        await live.put(kind="flatten", disk="", cancel=True)
        await live.runner.round()
        await live.runner.round()
        assert live.guest.begun == [("vda", IMAGE)] * 2


async def test_a_copy_that_ends_early_fails_the_merge(live: FlattenSite) -> None:
    async with live.merging():
        live.guest.running.clear()
        for _ in range(3):
            await live.runner.round()
        assert (await live.failed(), live.guest.begun) == ("copy_failed", [("vda", IMAGE)])


async def test_a_disk_that_is_attached_later_does_not_disturb_a_merge(live: FlattenSite) -> None:
    async with live.merging():
        del live.guest.named["sda"], live.guest.below["sda"]  # its record has it already
        await live.runner.round()
        assert (await live.status()).phase == "Running"
        live.guest.end("vda")
        await live.runner.round()
        status = await live.status()
    assert status.phase == "Succeeded"
    assert "data" in status.message


async def test_an_attach_during_the_look_does_not_disturb_a_merge(live: FlattenSite) -> None:
    async with live.merging():
        live.guest.late = True
        await live.runner.round()
        assert (await live.status()).phase == "Running"


async def test_a_cancel_ends_the_copies_of_disks_that_the_record_does_not_have(
    live: FlattenSite,
) -> None:
    async with live.merging():
        live.guest.running["vdz"] = ""
        await live.put(kind="flatten", disk="", cancel=True)
        await live.runner.round()
        assert ((await live.status()).phase, live.guest.running) == ("Cancelled", {})


async def test_a_cancel_waits_while_nobody_knows_if_the_copies_have_ended(
    live: FlattenSite,
) -> None:
    async with live.merging():
        await live.put(kind="flatten", disk="", cancel=True)
        live.vms[VM].phase = "new"  # an agent that has just started
        await live.runner.round()
        live.vms[VM].phase = "running"
        live.guest.up = False  # libvirt has lost the guest, and its QEMU copies on
        await live.runner.round()
        live.guest.up, live.guest.stuck = True, True
        await live.runner.round()
        assert (await live.status()).phase == "Running"
        live.guest.stuck = False
        await live.runner.round()
        assert ((await live.status()).phase, live.guest.running) == ("Cancelled", {})


async def test_a_guest_that_libvirt_does_not_have_is_asked_again(live: FlattenSite) -> None:
    async with live.merging():
        live.guest.up = False
        await live.runner.round()
        assert (await live.status()).phase == "Running"
        live.vms = {VM: Machine()}  # it has ended, and imaged continues
        await live.runner.round()
        assert (await live.status()).phase == "Succeeded"
    assert not live.merges[-1].live


async def test_a_volume_of_a_running_vm_is_not_merged(live: FlattenSite) -> None:
    more = {"resource": "volume", "uid": REF["uid"], "name": "data-1", "epoch": 0}
    async with live.merging(ref={**REF, "folder": "data-1"}, **more):
        assert (await live.failed(), live.guest.begun) == ("volume_in_use", [])


async def test_libvirt_that_does_not_know_the_files_is_refused(live: FlattenSite) -> None:
    live.guest.named["vda"] = "/old"
    live.guest.qemu = {}
    async with live.merging():
        assert (await live.failed(), live.guest.begun) == ("layers_differ", [])


async def test_qemu_says_what_is_merged(live: FlattenSite) -> None:
    """A libvirtd that died at the end of a copy may have another list below the disk."""
    live.guest.qemu = {"vda": (LAYER, IMAGE), "sda": ()}
    live.guest.below["vda"] = (IMAGE,)
    async with live.merging():
        assert (await live.failed(), live.guest.begun) == ("layers_differ", [])


async def test_simulated_guests_have_nothing_to_merge(live: FlattenSite) -> None:
    live.guest = cast("Any", NoLayers())
    live.restart()
    async with live.merging():
        assert await live.failed() == "guest_simulated"


def test_the_files_below_a_disk_are_those_of_libvirts_xml() -> None:
    xml = """<domain><devices><disk><source file="/top"/><backingStore type="file">
      <source file="/x/layers/a"/><backingStore type="file"><source file="/image"/><backingStore/>
      </backingStore></backingStore><target dev="vda"/></disk>
      <disk><target dev="sda"/></disk></devices></domain>"""
    assert files_below(xml) == {"vda": ("/x/layers/a", "/image"), "sda": ()}


class Sharing(Running):
    """Its volume is shared."""

    @property
    def record(self) -> VmRecord:
        found = super().record
        shared = found.volume_refs["data"].model_copy(update={"shared": True})
        return found.model_copy(update={"volume_refs": {"data": shared}})


def test_media_and_disks_elsewhere_are_left_out() -> None:
    vm: Any = Running()
    op = OperationRecord(
        id=uid(10), kind="flatten", node=NODE, namespace="default", resource="vm", uid=VM,
        name="web", epoch=1, created_ns=1,
    )  # fmt: skip
    names = [disk.name for disk in flatten_work(op, "ensure", [vm]).disks]
    assert names == ["root", "data"]
    assert [disk.name for disk in flatten_work(op, "ensure", [cast("Any", Sharing())]).disks] == [
        "root"
    ]
