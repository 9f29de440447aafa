"""Operations on a node: one at a time for each VM, and any crash continues or ends them."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, uid
from services.nodeagent.tests.pretended_node import record as vm_record

from virtbus.bus.client.memory_bus import Fault, MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Entry, Request, ServiceInfo
from virtbus.nodeagent.operation_runner import OperationRunner
from virtbus.nodeagent.vm.machine import VmPhase
from virtbus.nodeagent.vm.observation import Observed
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ExportWork, FillWork, WorkState
from virtbus.schemas.operation import (
    ExportResult,
    OperationPhase,
    OperationRecord,
    OperationStatus,
)
from virtbus.schemas.vm import MIB, VmRecord
from virtbus.schemas.volume_ref import FillSource, VolumeRef
from virtbus.schemas.wire import encode, read, validate

RESULT = ExportResult(path="/x", size_bytes=5, digest=f"sha256:{'5' * 64}")
VM = uid(1)


@dataclass
class Machine:
    """The state of a VM, as the runner reads it."""

    phase: VmPhase = "stopped"
    powered: bool = False
    deleting: bool = False
    epoch: int = 1
    volumes: tuple[VolumeRef, ...] = ()

    @property
    def observed(self) -> Any:
        return Observed(message="no such image")

    @property
    def record(self) -> VmRecord:
        return VmRecord.model_validate(
            {
                "volume_refs": {one.name: one for one in self.volumes},
                "uid": VM,
                "namespace": "default",
                "name": "web",
                "spec": {},
                "spec_hash": "",
                "node": NODE,
                "created_ns": 0,
                "epoch": self.epoch,
                "powered": self.powered,
                "deleting": self.deleting,
            }
        )

    @property
    def ends(self) -> bool:
        return self.deleting


@dataclass
class Imaged:
    """imaged's exports: each is done at the second request."""

    jobs: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    error: VirtbusError | None = None
    slow: bool = False

    async def answer(self, request: Request) -> WorkState:
        fill = request.subject.endswith("fill")
        want = validate(FillWork if fill else ExportWork, request.data)
        assert isinstance(want, FillWork | ExportWork)
        self.asked.append((want.id, want.do))
        if self.error is not None:
            raise self.error
        state = self.jobs.get(want.id, "none")
        if want.do == "remove" or (want.do == "cancel" and state != "done"):
            self.jobs.pop(want.id, None)
            return WorkState(state="none")
        if want.do == "ensure" and state != "done":
            busy = state == "none" or self.slow
            self.jobs[want.id] = state = "working" if busy else "done"
        if state == "done" and fill:
            return WorkState(state="done", virtual_size_bytes=MIB)
        if state == "done":
            return WorkState(state="done", result=RESULT)
        return WorkState(state="working", step="convert", done_bytes=1, total_bytes=5)


class Site:
    """One agent's runner on the fake bus, with imaged."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryServer(), "agent")
        self.vms = {VM: Machine()}
        self.imaged = Imaged()
        self.records: dict[str, Entry] = {}
        self.restart()

    def restart(self) -> None:
        """Begin again as a new agent, which lists the bus."""
        states: Any = lambda: self.vms.values()  # noqa: E731
        self.runner = OperationRunner(self.bus, NODE, states, lambda: True)
        self.runner.list_begins()
        for entry in self.records.values():
            self.runner.take(entry)
        self.runner.list_ends()

    def serving(self) -> Any:
        endpoints = [
            Endpoint(verb, subjects.rpc(NODE, "imaged", verb), self.imaged.answer)
            for verb in ("export", "fill")
        ]
        return self.bus.serve(ServiceInfo("virtbus-imaged", "1"), endpoints)

    async def put(self, number: int = 10, **more: Any) -> OperationRecord:
        fields: dict[str, Any] = {
            "id": uid(number),
            "node": NODE,
            "namespace": "default",
            "kind": "export",
            "resource": "vm",
        }
        fields |= {"uid": VM, "name": "web", "epoch": 1, "disk": "root", "created_ns": number}
        record = OperationRecord.model_validate(fields | more)
        key = subjects.operation_record(NODE, record.id)
        await self.bus.put(key, encode(record))
        await self.told(key)
        return record

    async def told(self, key: str) -> None:
        entry = await self.bus.get(key)
        assert entry is not None
        self.records[key] = entry
        self.runner.take(entry)

    async def status(self, number: int = 10) -> OperationStatus:
        entry = await self.bus.get(subjects.operation_status(NODE, uid(number)))
        if entry is None:
            return OperationStatus(id=uid(number), node=NODE)
        return read(OperationStatus, entry.value)

    async def phases(self, *numbers: int) -> list[str]:
        return [str((await self.status(number)).phase) for number in numbers]


@pytest.fixture
def site() -> Site:
    return Site()


async def test_an_export_begins_runs_and_succeeds(site: Site) -> None:
    async with site.serving():
        await site.put()
        await site.runner.round()
        begun = await site.status()
        assert (begun.phase, begun.step, begun.total_bytes) == ("Running", "convert", 5)
        await site.runner.round()
        ended = await site.status()
        assert (ended.phase, ended.result, ended.step) == ("Succeeded", RESULT, "")
        assert ended.ended_ns >= ended.begun_ns > 0
        asked = len(site.imaged.asked)
        await site.runner.round()
        assert len(site.imaged.asked) == asked


async def test_operations_of_one_vm_run_one_after_the_other(site: Site) -> None:
    async with site.serving():
        for number in (10, 11):
            await site.put(number)
        await site.runner.round()
        assert await site.phases(10, 11) == ["Running", "Accepted"]
        for _ in range(3):
            await site.runner.round()
        assert await site.phases(10, 11) == ["Succeeded", "Succeeded"]
        first = [id_ for id_, _ in site.imaged.asked]
        assert first == sorted(first)


@pytest.mark.parametrize(
    ("vms", "phase", "reason"),
    [
        ({}, "Failed", "vm_left"),
        ({VM: Machine(epoch=2)}, "Failed", "vm_left"),
        ({VM: Machine(phase="running", powered=True)}, "Failed", "vm_runs"),
        ({VM: Machine(phase="backing off", powered=True)}, "Failed", "vm_fails"),
        ({VM: Machine(phase="stopping")}, "Accepted", ""),
        ({VM: Machine(phase="new", powered=True)}, "Accepted", ""),
        ({VM: Machine(deleting=True)}, "Cancelled", ""),
    ],
)
async def test_an_export_needs_a_vm_that_is_off(
    site: Site, vms: dict[str, Machine], phase: str, reason: str
) -> None:
    site.vms = vms
    async with site.serving():
        await site.put()
        await site.runner.round()
        status = await site.status()
        assert (status.phase, status.error.reason if status.error else "") == (phase, reason)
        assert bool(status.message) == (phase != "Failed")
        assert site.imaged.asked == []


@pytest.mark.parametrize("kind", ["export", "snapshot", "restore", "backup"])
async def test_no_operation_waits_for_a_vm_that_never_starts(site: Site, kind: str) -> None:
    site.vms = {VM: Machine(phase="backing off", powered=True)}
    await site.put(kind=kind)
    await site.runner.round()
    status = await site.status()
    assert status.error is not None
    assert (status.phase, status.error.reason) == ("Failed", "vm_fails")
    assert "web does not start (no such image); `virtbus vm stop web`" in status.error.message


async def test_a_backup_waits_for_a_vm_that_starts(site: Site) -> None:
    site.vms = {VM: Machine(phase="starting", powered=True)}
    await site.put(kind="backup")
    await site.runner.round()
    status = await site.status()
    assert (status.phase, status.message) == ("Accepted", "web is starting")


async def test_a_stop_is_waited_for(site: Site) -> None:
    site.vms[VM].phase = "stopping"
    async with site.serving():
        await site.put()
        await site.runner.round()
        site.vms[VM].phase = "stopped"
        for _ in range(2):
            await site.runner.round()
        assert await site.phases(10) == ["Succeeded"]


@pytest.mark.parametrize("change", [{"deleting": True}, {"phase": "releasing"}, {"epoch": 2}])
async def test_a_delete_cancels_a_running_export(site: Site, change: dict[str, Any]) -> None:
    site.imaged.slow = True
    async with site.serving():
        await site.put()
        await site.runner.round()
        for name, value in change.items():
            setattr(site.vms[VM], name, value)
        await site.runner.round()
        status = await site.status()
        assert (status.phase, status.message != "") == ("Cancelled", True)
        assert site.imaged.asked[-1] == (uid(10), "cancel")


async def test_a_cancel_before_the_final_step_ends_it_and_after_it_comes_too_late(
    site: Site,
) -> None:
    site.imaged.slow = True
    async with site.serving():
        for number in (10, 11):
            await site.put(number)
            await site.runner.round()
            if number == 11:
                site.imaged.jobs[uid(11)] = "done"
            await site.put(number, cancel=True)
            await site.runner.round()
        await site.runner.round()
        assert await site.phases(10, 11) == ["Cancelled", "Succeeded"]


async def test_a_start_of_the_vm_does_not_end_a_running_export(site: Site) -> None:
    async with site.serving():
        await site.put()
        await site.runner.round()
        site.vms[VM] = Machine(phase="preparing", powered=True)
        await site.runner.round()
        assert await site.phases(10) == ["Succeeded"]


async def test_failures_of_imaged(site: Site) -> None:
    async with site.serving():
        await site.put()
        site.imaged.error = VirtbusError(Code.UNAVAILABLE, "recovering", "it reads its store")
        await site.runner.round()
        assert await site.phases(10) == ["Running"]
        site.imaged.error = VirtbusError(Code.UNAVAILABLE, "disk_full", "full")
        await site.runner.round()
        status = await site.status()
        assert status.error is not None
        assert (status.phase, status.error.reason) == ("Failed", "disk_full")


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("write", [0, 1])
async def test_a_restart_at_each_write_continues(site: Site, write: int, fault: Fault) -> None:
    """The status is written at the begin and at the end; either write may be lost or unknown."""
    async with site.serving():
        await site.put()
        for _ in range(write):
            await site.runner.round()
        site.bus.faults.append(fault)
        await site.runner.round()
        site.restart()
        for _ in range(3):
            await site.runner.round()
        status = await site.status()
        assert (status.phase, status.result) == ("Succeeded", RESULT)
        assert not site.bus.faults


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("write", [0, 1])
async def test_a_write_that_fails_is_repeated(site: Site, write: int, fault: Fault) -> None:
    async with site.serving():
        await site.put()
        for _ in range(write):
            await site.runner.round()
        site.bus.faults.append(fault)
        for _ in range(4):
            await site.runner.round()
        assert await site.phases(10) == ["Succeeded"]


async def test_an_end_that_was_stored_without_an_answer_is_final(site: Site) -> None:
    """Its result may be gone by then: a restore would replace the disks once more."""
    async with site.serving():
        await site.put()
        await site.runner.round()
        site.bus.faults.append(Fault.STORED)
        await site.runner.round()
        asked = len(site.imaged.asked)
        for _ in range(3):
            await site.runner.round()
        assert await site.phases(10) == ["Succeeded"]
        assert len(site.imaged.asked) == asked


async def test_an_operation_that_a_controller_ended_is_not_begun(site: Site) -> None:
    async with site.serving():
        record = await site.put()
        ended = OperationStatus(id=record.id, node=NODE, phase=OperationPhase.CANCELLED)
        await site.bus.put(subjects.operation_status(NODE, record.id), encode(ended))
        await site.runner.round()
        assert (await site.phases(10), site.imaged.asked) == (["Cancelled"], [])


async def test_the_file_of_a_deleted_operation_is_removed_once(site: Site) -> None:
    async with site.serving():
        record = await site.put()
        for _ in range(2):
            await site.runner.round()
        key = subjects.operation_record(NODE, record.id)
        await site.bus.purge(key)
        await site.told(key)
        await site.runner.round()
        await site.told(key)  # as each list does
        await site.runner.round()
        assert [do for _, do in site.imaged.asked] == ["ensure", "ensure", "remove"]
        assert site.runner.of_id(record.id) is None


async def test_the_file_of_a_deleted_operation_is_removed_once_imaged_has_started(
    site: Site,
) -> None:
    async with site.serving():
        record = await site.put()
        key = subjects.operation_record(NODE, record.id)
        await site.bus.purge(key)
        await site.told(key)
        site.imaged.error = VirtbusError(Code.UNAVAILABLE, "recovering", "imaged reads its store")
        await site.runner.round()
        site.imaged.error = None
        for _ in range(2):
            await site.runner.round()
        assert [do for _, do in site.imaged.asked] == ["remove", "remove"]


async def test_the_file_of_a_deleted_operation_is_removed_once_imaged_is_back(site: Site) -> None:
    async with site.serving():
        record = await site.put()
        for _ in range(2):
            await site.runner.round()
        site.imaged.asked.clear()
    key = subjects.operation_record(NODE, record.id)
    await site.bus.purge(key)
    await site.told(key)
    await site.runner.round()  # nobody serves
    assert site.imaged.asked == []
    async with site.serving():
        for _ in range(2):
            await site.runner.round()
        assert [do for _, do in site.imaged.asked] == ["remove"]


async def test_an_operation_without_a_record_is_only_forgotten(site: Site) -> None:
    site.imaged.slow = True
    async with site.serving():
        record = await site.put()
        await site.runner.round()
        site.records.clear()
        site.runner.list_begins()
        site.runner.list_ends()
        await site.runner.round()
        assert site.runner.of_id(record.id) is None
        assert [do for _, do in site.imaged.asked] == ["ensure"]


def volume_ref(number: int, name: str) -> VolumeRef:
    return VolumeRef(uid=uid(number), namespace="default", name=name, size_bytes=MIB)


FILL: dict[str, Any] = {
    "kind": "fill",
    "resource": "volume",
    "uid": uid(70),
    "name": "copy",
    "disk": "",
    "ref": volume_ref(70, "copy"),
    "source": FillSource(volume=volume_ref(71, "data")),
}


async def test_a_volume_is_filled_while_its_vm_waits(site: Site) -> None:
    site.vms[VM] = Machine("preparing", powered=True, volumes=(volume_ref(70, "copy"),))
    await site.put(**FILL)
    async with site.serving():
        for _ in range(3):
            await site.runner.round()
    status = await site.status()
    assert (status.phase, status.virtual_size_bytes) == ("Succeeded", MIB)
    assert site.imaged.asked == [(uid(10), "ensure")] * 2


async def test_a_volume_is_copied_while_its_vm_is_off_only(site: Site) -> None:
    of = (volume_ref(71, "data"),)
    cases: list[tuple[Machine, str, str]] = [
        (Machine("running", powered=True, volumes=of), "Failed", "volume_in_use"),
        (Machine("running", powered=False, volumes=of), "Accepted", ""),
        (Machine("new", powered=True, volumes=of), "Accepted", ""),
        (Machine("stopped", volumes=of), "Running", ""),
        (Machine("running", powered=True), "Running", ""),
    ]
    for number, (vm, phase, reason) in enumerate(cases, 10):
        site.vms[VM] = vm
        await site.put(number, **FILL | {"uid": uid(100 + number)})
        async with site.serving():
            await site.runner.round()
        status = await site.status(number)
        found = status.error.reason if status.error is not None else ""
        assert (str(status.phase), found) == (phase, reason), vm


async def test_a_disk_of_a_vm_is_copied_while_it_is_off_and_here(site: Site) -> None:
    cases: list[tuple[Machine, str, str]] = [
        (Machine("running", powered=True), "Failed", "vm_runs"),
        (Machine("stopped", epoch=2), "Failed", "vm_left"),
        (Machine("stopping", powered=False), "Accepted", ""),
        (Machine("stopped", deleting=True), "Cancelled", ""),
        (Machine("stopped"), "Running", ""),
    ]
    source = FillSource(vm=VM, epoch=1, disk="root")
    for number, (vm, phase, reason) in enumerate(cases, 10):
        site.vms[VM] = vm
        await site.put(number, **FILL | {"uid": uid(100 + number), "source": source})
        async with site.serving():
            await site.runner.round()
        status = await site.status(number)
        found = status.error.reason if status.error is not None else ""
        assert (str(status.phase), found) == (phase, reason), vm
    site.vms[VM] = Machine("stopped", deleting=True)
    async with site.serving():
        await site.runner.round()
    assert await site.phases(14) == ["Cancelled"]


async def test_an_operation_that_is_forgotten_during_a_request_ends_nobody(site: Site) -> None:
    """The list of a new connection may lack an operation that is being worked on."""
    await site.put()

    async def answer(request: Request) -> WorkState:
        site.runner.list_begins()
        site.runner.list_ends()
        return await site.imaged.answer(request)

    subject = subjects.rpc(NODE, "imaged", "export")
    served = [Endpoint("export", subject, answer)]
    async with site.bus.serve(ServiceInfo("virtbus-imaged", "1"), served):
        await site.runner.round()
    site.restart()
    async with site.serving():
        for _ in range(2):
            await site.runner.round()
    assert await site.phases(10) == ["Succeeded"]


async def test_a_fill_is_cancelled(site: Site) -> None:
    site.imaged.slow = True
    await site.put(**FILL)
    async with site.serving():
        await site.runner.round()
        await site.put(**FILL, cancel=True)
        await site.runner.round()
    assert await site.phases(10) == ["Cancelled"]
    assert site.imaged.asked[-1] == (uid(10), "cancel")


async def test_without_imaged_an_operation_waits(site: Site) -> None:
    await site.put()
    async with asyncio.timeout(30):
        await site.runner.round()
    assert await site.phases(10) == ["Running"]
    async with site.serving():
        for _ in range(2):
            await site.runner.round()
    assert await site.phases(10) == ["Succeeded"]


async def test_an_agent_exports_and_a_restarted_one_continues(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    vm = vm_record(1, powered=False)
    await node.put(vm)

    async def is_phase(wanted: str) -> None:
        async def check() -> bool:
            return await node.export_phase() == wanted

        await eventually(check)

    async with node.agent():
        await eventually(in_state(node, "Stopped"))
        key = await node.export(vm)
        await is_phase("Running")
    async with node.agent() as agent:
        await is_phase("Succeeded")
        assert agent.vms.listings.count({"unreadable"}) == 0
        await node.bus.purge(key, why=b"deleted")
        await eventually(lambda: agent.vms.operations.of_id(uid(10)) is None)
        await node.start_another()
