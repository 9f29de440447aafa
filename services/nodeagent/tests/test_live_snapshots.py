"""A snapshot of a running guest goes forward or back by QEMU's own answer, after any crash."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_operations import VM, Machine, Site

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import assigned
from virtbus.nodeagent.core.guest_layers import GuestLayers
from virtbus.nodeagent.core.plugs import GuestDisks
from virtbus.nodeagent.live_snapshots import LiveSnapshots
from virtbus.nodeagent.operation_runner import LiveWork, OperationRunner
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationStatus
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.vm import MIB, VmRecord
from virtbus.schemas.wire import validate

REF = {"uid": uid(7), "namespace": "default", "name": "data-1", "size_bytes": 5}
TAKEN = {"uid": uid(10), "namespace": "default", "name": "s"}
SPEC = {
    "domain": {"devices": {"disks": [{"name": "root"}, {"name": "data", "bus": "scsi"}]}},
    "volumes": [
        {"name": "root", "image": {"ref": "tiny"}},
        {"name": "data", "volume": {"name": "data-1"}},
    ],
}
DOWN = VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")
BROKEN = VirtbusError(Code.INTERNAL, "libvirt_failed", "freeze the disks: no")


@dataclass
class Running(Machine):
    """A running VM with its own disk and a volume."""

    phase: Any = "running"
    powered: bool = True
    image: Any = field(default_factory=lambda: SimpleNamespace(reset=lambda: None))
    has: tuple[str, ...] = ("root", "data")
    """The disks that the guest has."""
    pending: Mapping[str, str] = field(default_factory=dict)

    @property
    def record(self) -> VmRecord:
        fields = super().record.model_dump() | {"spec": SPEC, "volume_refs": {"data": REF}}
        return VmRecord.model_validate(fields)

    @property
    def observed(self) -> Any:
        addresses = {
            pool: {name: number for name, number in numbers.items() if name in self.has}
            for pool, numbers in assigned(self.record.spec.domain).items()
        }
        return SimpleNamespace(disks=GuestDisks(addresses, pending=self.pending))


@dataclass
class Guest:
    """The ports of libvirt, the disk files and the guest agent."""

    used: dict[str, int] = field(default_factory=lambda: {"/root": 8 * MIB, "/data": 5 * MIB})
    named: dict[str, str] = field(default_factory=lambda: {"vda": "/root", "sda": "/data"})
    pins: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    up: bool = True
    look_error: VirtbusError | None = None
    switch_error: VirtbusError | None = None
    switches: bool = True
    """True: QEMU takes the new files."""
    frozen: bool = False
    agent: bool = True

    async def look(self, _uid: str) -> GuestLayers | None:
        if self.look_error is not None:
            raise self.look_error
        return GuestLayers(dict(self.used), dict(self.named)) if self.up else None

    async def switch(self, _uid: str, new: Mapping[str, str]) -> None:
        assert set(new.values()) <= self.pins
        self.done.append(f"switch, frozen {self.frozen}")
        if self.switches:
            sizes = {target: self.used[self.named[target]] for target in new}
            self.used = {path: sizes[target] for target, path in new.items()}
            if self.switch_error is None:
                self.named |= new
        if self.switch_error is not None:
            raise self.switch_error

    def layer_pin(self, _uid: str, volume: str, snapshot_uid: str) -> str:
        return f"/{volume}.{snapshot_uid}"

    async def pin_layer(self, of: str, volume: str, _disk: SnapshotDisk, snapshot_uid: str) -> None:
        self.pins.add(self.layer_pin(of, volume, snapshot_uid))

    async def unpin(self, pin: str) -> None:
        self.pins.discard(pin)

    def of(self, _uid: str) -> None:
        return None

    async def freeze(self, _uid: str, *, for_s: float, timeout_s: float) -> None:
        if not self.agent:
            raise VirtbusError(Code.CONFLICT, "guest_agent_absent", "no guest agent runs")
        self.frozen = True

    async def thaw(self, _uid: str, _why: str, *, timeout_s: float) -> None:
        self.frozen = False


class LiveSite(Site):
    """A runner whose VM runs, and imaged, which stages and waits for QEMU's answer."""

    def __init__(self) -> None:
        self.guest = Guest()
        self.asked: list[SnapshotWork] = []
        self.phase = "none"
        self.made = 0
        super().__init__()
        self.vms = {VM: Running()}

    def restart(self) -> None:
        guest: Any = self.guest
        tools = SimpleNamespace(layers=guest, disks=guest, freezes=guest)
        live = LiveSnapshots(cast("AgentPorts", tools), self.count)
        states: Any = lambda: self.vms.values()  # noqa: E731
        self.runner = OperationRunner(self.bus, NODE, states, lambda: True, LiveWork(live))
        self.runner.list_begins()
        for entry in self.records.values():
            self.runner.take(entry)
        self.runner.list_ends()

    def count(self) -> None:
        self.made += 1

    async def answer(self, request: Request) -> WorkState:
        want = validate(SnapshotWork, request.data)
        self.asked.append(want)
        if self.phase == "staged" and want.switched is not None:
            self.phase = "done" if want.switched else "none"
        elif self.phase == "none" and want.do == "ensure":
            self.phase = "staged"
        if self.phase == "done":
            return WorkState(state="done")
        if self.phase == "none":
            return WorkState(state="none")
        return WorkState(state="working", step="layer")

    @asynccontextmanager
    async def live(self, **more: Any) -> AsyncIterator[None]:
        endpoint = Endpoint("snapshot", subjects.rpc(NODE, "imaged", "snapshot"), self.answer)
        async with self.bus.serve(ServiceInfo("virtbus-imaged", "1"), [endpoint]):
            await self.put(kind="snapshot", disk="", snapshot=TAKEN, **more)
            yield

    async def after(self, rounds: int = 1) -> OperationStatus:
        for _ in range(rounds):
            await self.runner.round()
        return await self.status()


@pytest.fixture
def site() -> LiveSite:
    return LiveSite()


async def test_one_round_freezes_all_disks_and_thaws_the_guest(site: LiveSite) -> None:
    async with site.live():
        status = await site.after()
        assert (status.phase, status.message, site.made) == ("Succeeded", "", 1)
        assert site.guest.done == ["switch, frozen True"]
        assert not site.guest.frozen
        staged = site.asked[0]
        assert (staged.layered, staged.live) == (True, True)
        sizes = {disk.name: disk.size_bytes for disk in staged.disks}
        assert sizes == {"root": 8 * MIB, "data": 5 * MIB}


async def test_a_guest_without_an_agent_is_frozen_as_a_crash_would_leave_it(
    site: LiveSite,
) -> None:
    site.guest.agent = False
    async with site.live():
        status = await site.after()
        assert status.phase == "Succeeded"
        assert "not frozen: no guest agent runs" in status.message


async def test_a_volume_alone_is_frozen_in_its_guest(site: LiveSite) -> None:
    of = {"resource": "volume", "uid": uid(7), "name": "data-1", "ref": REF}
    async with site.live(**of):
        assert (await site.after()).phase == "Succeeded"
        assert site.guest.named == {"vda": "/root", "sda": f"/data.{uid(10)}"}


async def test_qemus_answer_decides_after_an_error_of_libvirt(site: LiveSite) -> None:
    site.guest.switch_error = DOWN
    async with site.live():
        assert (await site.after()).phase == "Succeeded"
        assert site.asked[-1].switched
        assert len(site.guest.pins) == 2  # the names that QEMU knows stay


async def test_a_switch_that_failed_leaves_nothing(site: LiveSite) -> None:
    site.guest.switch_error, site.guest.switches = BROKEN, False
    async with site.live():
        status = await site.after()
        assert status.error is not None
        assert (status.phase, status.error.reason) == ("Failed", "libvirt_failed")
        assert (site.asked[-1].do, site.asked[-1].switched) == ("cancel", False)
        assert (site.guest.pins, site.phase, site.guest.frozen) == (set(), "none", False)


async def test_an_agent_that_died_after_the_switch_does_not_switch_again(site: LiveSite) -> None:
    async with site.live():
        site.guest.look_error = DOWN
        assert (await site.after()).phase == "Running"
        site.guest.look_error, site.phase = None, "staged"
        new = {target: f"/{name}.{uid(10)}" for target, name in (("vda", "root"), ("sda", "data"))}
        site.guest.pins |= set(new.values())
        await site.guest.switch(VM, new)
        site.restart()
        assert (await site.after()).phase == "Succeeded"
        assert len(site.guest.done) == 1


async def test_while_nobody_knows_what_qemu_uses_the_operation_waits(site: LiveSite) -> None:
    site.guest.switch_error = DOWN
    async with site.live():
        site.phase = "staged"
        look, site.guest.look_error = site.guest.look, None
        seen = 0

        async def once(of: str) -> GuestLayers | None:
            nonlocal seen
            seen += 1
            if seen == 2:
                raise DOWN
            return await look(of)

        cast("Any", site.guest).look = once
        assert (await site.after()).phase == "Running"
        assert (await site.after()).phase == "Succeeded"
        assert len(site.guest.done) == 1


async def test_a_guest_that_ended_or_is_lost_leaves_the_decision_to_imaged(
    site: LiveSite,
) -> None:
    async with site.live():
        site.guest.up = False
        assert (await site.after()).phase == "Running"
        assert {want.switched for want in site.asked} == {None}


async def test_a_guest_whose_files_libvirt_does_not_know_is_refused(site: LiveSite) -> None:
    site.guest.named["vda"] = "/older"
    async with site.live():
        status = await site.after()
        assert status.error is not None
        assert status.error.reason == "layers_differ"
        assert site.guest.done == []


async def test_a_snapshot_waits_for_a_disk_that_is_being_attached(site: LiveSite) -> None:
    site.vms = {VM: Running(has=("root",))}
    async with site.live():
        status = await site.after()
        assert status.phase == "Running"
        assert "the disk data is being attached" in status.message
        assert site.asked == []
        site.vms = {VM: Running()}
        assert (await site.after()).phase == "Succeeded"


async def test_a_disk_that_cannot_be_attached_is_named_with_its_cause(site: LiveSite) -> None:
    site.vms = {VM: Running(has=("root",), pending={"data": "Attaching: no free PCI port"})}
    async with site.live():
        status = await site.after()
        assert status.error is not None
        assert (status.phase, status.error.reason) == ("Failed", "disk_not_switchable")
        assert "the disk data: Attaching: no free PCI port" in status.error.message


async def test_a_cancel_after_the_switch_is_too_late(site: LiveSite) -> None:
    async with site.live():
        site.guest.look_error = DOWN
        await site.after()
        site.guest.look_error, site.phase = None, "staged"
        site.guest.used = {f"/root.{uid(10)}": 1, f"/data.{uid(10)}": 1}
        await site.put(kind="snapshot", disk="", snapshot=TAKEN, cancel=True)
        assert (await site.after()).phase == "Succeeded"


async def test_a_cancel_before_it_changes_nothing(site: LiveSite) -> None:
    async with site.live():
        site.guest.look_error = DOWN
        await site.after()
        site.guest.look_error, site.phase = None, "staged"
        await site.put(kind="snapshot", disk="", snapshot=TAKEN, cancel=True)
        assert (await site.after()).phase == "Cancelled"
        assert (site.phase, site.guest.done) == ("none", [])
        await asyncio.sleep(0)
