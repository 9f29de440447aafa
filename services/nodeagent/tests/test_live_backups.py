"""A backup of a running guest is complete or absent, after any fault of its helpers."""

from collections.abc import AsyncIterator, Collection, Mapping
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
from virtbus.nodeagent.core.guest_backups import (
    Bitmap,
    PushState,
    backup_xml,
    checkpoint_xml,
    common_bitmaps,
    description,
)
from virtbus.nodeagent.live_backups import LiveBackups
from virtbus.nodeagent.operation_runner import LiveWork, OperationRunner
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupWork, VerifyWork, bitmap_name
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationStatus
from virtbus.schemas.vm import MIB
from virtbus.schemas.wire import validate

ID = uid(10)
OLD = bitmap_name(uid(9))
DOWN = VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")
FAILED = VirtbusError(Code.INTERNAL, "libvirt_failed", "begin the backup: no")
XML = """<domain><devices><disk><target dev="vda"/></disk><disk><target dev="sda"/></disk>
</devices></domain>"""


@dataclass
class BackedGuest(Guest):
    """The ports of `Guest`, and that of backups."""

    known: set[str] = field(default_factory=set)
    push: PushState = field(default_factory=PushState)
    since: str = ""
    begin_error: VirtbusError | None = None
    ask_error: VirtbusError | None = None
    abort_error: VirtbusError | None = None
    frozen_at_begin: bool = False
    unpinnable: str = ""

    async def bitmaps(self, _uid: str, targets: Collection[str]) -> frozenset[str]:
        assert set(targets) == {"vda", "sda"}
        return frozenset(self.known)

    async def begin(self, _uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        assert set(files.values()) <= self.pins
        self.frozen_at_begin, self.since = self.frozen, since
        if self.begin_error is not None:
            raise self.begin_error
        self.done.append("begin")
        self.known.add(bitmap)
        self.push = PushState("running", 1, 4)

    async def progress(self, _uid: str) -> PushState:
        if self.ask_error is not None:
            raise self.ask_error
        return self.push

    async def abort(self, _uid: str) -> None:
        if self.abort_error is not None:
            raise self.abort_error
        if self.push.state == "running":
            self.done.append("abort")
            self.push = PushState("failed", why="aborted")

    async def keep_only(self, _uid: str, bitmaps: Collection[str] | None, drop: str = "") -> None:
        self.known = self.known - {drop} if bitmaps is None else self.known & set(bitmaps)

    async def pin_backup(self, _uid: str, disk: str, backup: str) -> str:
        if disk == self.unpinnable:
            raise VirtbusError(Code.CONFLICT, "disk_refused", "another kind of file")
        self.pins.add(f"/{disk}.{backup}")
        return f"/{disk}.{backup}"

    async def unpin_backup(self, _uid: str, backup: str) -> None:
        self.pins = {pin for pin in self.pins if not pin.endswith(backup)}


class BackupSite(Site):
    """A runner whose VM runs, and imaged, which stages and stores files."""

    def __init__(self) -> None:
        self.guest = BackedGuest()
        self.asked: list[BackupWork] = []
        self.parent = ""
        self.phase = "none"
        self.store_error: VirtbusError | None = None
        super().__init__()
        self.vms = {VM: Running()}

    def restart(self) -> None:
        guest: Any = self.guest
        tools = SimpleNamespace(
            layers=guest, disks=guest, freezes=guest, backups=guest, bus=self.bus
        )
        live = LiveBackups(cast("AgentPorts", tools))
        states: Any = lambda: self.vms.values()  # noqa: E731
        self.runner = OperationRunner(self.bus, NODE, states, lambda: True, LiveWork(None, live))
        self.runner.list_begins()
        for entry in self.records.values():
            self.runner.take(entry)
        self.runner.list_ends()

    async def answer(self, request: Request) -> WorkState:
        want = validate(BackupWork, request.data)
        self.asked.append(want)
        if want.do == "cancel":
            self.phase = "done" if self.phase == "done" else "none"
            return WorkState(state="done" if self.phase == "done" else "none")
        if self.phase == "done":
            return WorkState(state="done", message="full: test", done_bytes=5)
        if self.store_error is not None:
            raise self.store_error
        if want.pushed or not want.live:
            self.phase = "done"
            return WorkState(state="working", step="store")
        self.phase = "staged"
        return WorkState(state="working", step="push", parent=self.parent)

    async def checked(self, request: Request) -> WorkState:
        validate(VerifyWork, request.data)
        return WorkState(state="done")

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[None]:
        verbs = {"backup": self.answer, "backup-verify": self.checked}
        endpoints = [
            Endpoint(verb, subjects.rpc(NODE, "imaged", verb), handler)
            for verb, handler in verbs.items()
        ]
        async with self.bus.serve(ServiceInfo("virtbus-imaged", "1"), endpoints):
            await self.put(**({"kind": "backup", "disk": ""} | more))
            yield

    async def after(self, rounds: int = 1) -> OperationStatus:
        for _ in range(rounds):
            await self.runner.round()
        return await self.status()


@pytest.fixture
def site() -> BackupSite:
    return BackupSite()


async def test_qemu_writes_all_disks_of_one_instant_and_imaged_stores_them(
    site: BackupSite,
) -> None:
    site.guest.known = {OLD}
    site.parent = OLD
    async with site.running():
        status = await site.after()
        assert (status.phase, status.step) == ("Running", "push")
        assert (site.guest.frozen_at_begin, site.guest.frozen, site.guest.since) == (
            *(True, False),
            OLD,
        )
        staged = site.asked[0]
        assert staged.bitmaps == (OLD,)
        sizes = {disk.name: disk.size_bytes for disk in staged.disks}
        assert sizes == {"root": 8 * MIB, "data": 5 * MIB}
        assert staged.spec["volumes"][0]["name"] == "root"
        await site.after()
        assert site.asked[-1].bitmaps is None
        site.guest.push = PushState("done")
        status = await site.after(2)
        stored = next(want for want in site.asked if want.pushed)
        assert stored.attempt == staged.attempt != ""
        assert (status.phase, status.message) == ("Succeeded", "full: test")
        assert (site.guest.known, site.guest.pins) == ({bitmap_name(ID)}, set())


async def test_an_agent_that_restarts_begins_anew(site: BackupSite) -> None:
    async with site.running():
        await site.after()
        site.restart()
        assert (await site.after()).phase == "Running"
        assert site.guest.done == ["begin", "abort", "begin"]
        site.guest.push = PushState("done")
        await site.after()
        site.restart()  # imaged has stored it meanwhile
        assert (await site.after()).phase == "Succeeded"


@pytest.mark.parametrize("push", [PushState(), PushState("failed", why="no space")])
async def test_files_that_qemu_did_not_complete_are_removed(
    site: BackupSite, push: PushState
) -> None:
    site.guest.known = {OLD}
    async with site.running():
        await site.after()
        site.guest.push = push
        status = await site.after()
        assert status.phase == "Failed"
        assert site.asked[-1].do == "cancel"
        assert (site.guest.pins, site.guest.known) == (set(), {OLD})


async def test_a_guest_that_ends_after_the_copy_is_stored_all_the_same(site: BackupSite) -> None:
    async with site.running():
        await site.after()
        site.guest.push = PushState("done")
        site.store_error = VirtbusError(Code.UNAVAILABLE, "recovering", "imaged starts")
        await site.after()
        site.vms = {VM: Machine(phase="stopped")}
        site.store_error = None
        assert (await site.after(2)).phase == "Succeeded"


async def test_a_guest_that_ends_during_the_copy_fails_it(site: BackupSite) -> None:
    async with site.running():
        await site.after()
        site.vms, site.guest.push = {VM: Machine(phase="stopped")}, PushState()
        status = await site.after()
        assert status.error is not None
        assert status.error.reason == "guest_ended"


async def test_libvirt_that_is_away_is_asked_again(site: BackupSite) -> None:
    async with site.running():
        await site.after()
        site.guest.ask_error = DOWN
        assert (await site.after()).phase == "Running"
        site.guest.ask_error, site.guest.push = None, PushState("done")
        assert (await site.after(2)).phase == "Succeeded"


async def test_a_backup_begins_again_if_libvirt_has_forgotten_it(site: BackupSite) -> None:
    async with site.running():
        await site.after()
        site.guest.push = PushState("lost")
        assert (await site.after()).phase == "Running"
        site.guest.push = PushState()
        await site.after()
        assert site.guest.done == ["begin", "begin"]
        site.guest.push = PushState("done")
        assert (await site.after(2)).phase == "Succeeded"


async def test_a_backup_begins_again_after_libvirt_died_at_its_begin(site: BackupSite) -> None:
    site.guest.known = {OLD}
    site.guest.begin_error = DOWN
    async with site.running():
        assert (await site.after()).phase == "Running"
        assert not site.guest.frozen
        site.guest.begin_error, site.guest.push = None, PushState("running")
        status = await site.after()
        assert (status.phase, site.guest.done) == ("Running", ["abort", "begin"])
        site.guest.push = PushState("done")
        assert (await site.after(2)).phase == "Succeeded"
        assert site.guest.known == {bitmap_name(ID)}


async def test_a_refusal_of_libvirt_leaves_nothing(site: BackupSite) -> None:
    site.guest.begin_error = FAILED
    async with site.running():
        status = await site.after()
        assert (status.phase, site.guest.frozen) == ("Failed", False)
        assert (site.phase, site.guest.pins) == ("none", set())


async def test_a_disk_that_is_no_file_fails_the_backup(site: BackupSite) -> None:
    del site.guest.named["sda"]
    async with site.running():
        status = await site.after()
        assert status.error is not None
        assert (status.phase, status.error.reason) == ("Failed", "disk_not_switchable")
        assert "disk data is not a file" in status.error.message


async def test_an_unexpected_error_fails_its_operation_only(site: BackupSite) -> None:
    site.guest.begin_error = cast("VirtbusError", KeyError("sda"))
    async with site.running():
        status = await site.after()
        assert status.error is not None
        assert (status.phase, status.error.code) == ("Failed", Code.INTERNAL)
        assert (site.phase, site.guest.pins) == ("none", set())


async def test_a_cancel_ends_the_copy(site: BackupSite) -> None:
    async with site.running():
        await site.after()
        await site.put(kind="backup", disk="", cancel=True)
        assert (await site.after()).phase == "Cancelled"
        assert site.guest.done == ["begin", "abort"]


@pytest.mark.parametrize("up", [True, False])
async def test_a_cancel_ends_the_copy_of_an_earlier_agent(site: BackupSite, *, up: bool) -> None:
    async with site.running():
        await site.after()
        site.restart()
        site.guest.abort_error = None if up else DOWN
        await site.put(kind="backup", disk="", cancel=True)
        assert (await site.after()).phase == "Cancelled"
        assert site.guest.done == ["begin", *(["abort"] if up else [])]
        assert (site.phase, site.guest.pins) == ("none", set())


async def test_a_disk_that_is_refused_leaves_no_name_of_another(site: BackupSite) -> None:
    site.guest.unpinnable = "data"
    async with site.running():
        assert (await site.after()).phase == "Failed"
        assert (site.phase, site.guest.pins) == ("none", set())


async def test_a_vm_that_is_off_is_copied_by_imaged_and_one_that_starts_is_waited_for(
    site: BackupSite,
) -> None:
    site.vms = {VM: Machine(phase="starting", powered=True)}
    async with site.running():
        status = await site.after()
        assert (status.phase, "starting" in status.message) == ("Accepted", True)
        site.vms = {VM: Machine(phase="stopped")}
        assert (await site.after(2)).phase == "Succeeded"
        assert not site.asked[-1].live


async def test_a_verification_needs_no_vm(site: BackupSite) -> None:
    site.vms = {}
    async with site.running(kind="verify", uid=uid(3), backup=uid(3), disk=""):
        assert (await site.after()).phase == "Succeeded"


def test_libvirt_is_asked_for_the_chosen_disks_only() -> None:
    asked = backup_xml(XML, {"vda": "/file"}, "since")
    assert '<disk name="vda" backup="yes" type="file">' in asked
    assert '<disk name="sda" backup="no"' in asked
    assert "<incremental>since</incremental>" in asked
    assert "incremental" not in backup_xml(XML, {"vda": "/file"}, "")
    made = checkpoint_xml(XML, ["vda"], "one")
    assert '<disk name="vda" checkpoint="bitmap" bitmap="one"' in made
    assert '<disk name="sda" checkpoint="no"' in made


def test_only_bitmaps_that_all_disks_have_and_that_count_all_writes_are_used() -> None:
    one, lost = Bitmap("one", usable=True), Bitmap("two", usable=False)
    assert common_bitmaps([(one, lost), (one,)]) == {"one"}
    assert common_bitmaps([(one,), ()]) == frozenset()
    assert common_bitmaps([]) == frozenset()


@pytest.mark.parametrize("about", ["", f"data={uid(7)} root="])
def test_libvirt_keeps_the_description_of_a_bitmap(about: str) -> None:
    assert description(checkpoint_xml(XML, {"vda"}, "b", about)) == about
