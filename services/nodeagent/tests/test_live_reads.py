"""A reader has one instant of a running guest, for a bounded time, and nothing of it is left."""

import errno
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services.nodeagent.tests.pretended_node import NODE, uid
from services.nodeagent.tests.test_live_backups import DOWN, FAILED, BackedGuest
from services.nodeagent.tests.test_live_snapshots import REF, TAKEN, Running
from services.nodeagent.tests.test_operations import VM, Machine, Site

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_backups import Reading, reading_xml, served_socket
from virtbus.nodeagent.live_reads import LiveReads
from virtbus.nodeagent.operation_runner import LiveWork, OperationRunner
from virtbus.schemas import subjects
from virtbus.schemas.backup import READ_BITMAP, ScratchWork, bitmap_name, read_bitmap
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import OperationStatus
from virtbus.schemas.vm import MIB
from virtbus.schemas.wire import validate

ID, EARLIER = uid(10), uid(9)
BACKUP = bitmap_name(uid(8))
XML = """<domain><devices><disk><target dev="vda"/></disk><disk><target dev="sda"/></disk>
</devices></domain>"""


@dataclass
class ReadGuest(BackedGuest):
    """The ports of `BackedGuest`, and that of readings."""

    serves: bool = False
    reading: Reading | None = None
    served_error: VirtbusError | None = None
    pins_error: OSError | None = None
    answer_error: VirtbusError | None = None
    """The error with which `begin` answers although the guest serves its disks."""
    lost: bool = False
    """True: libvirt does not know the guest, whose QEMU may run."""
    about: dict[str, str] = field(default_factory=dict)
    """The descriptions of bitmaps."""

    async def bitmaps(
        self, _uid: str, targets: Collection[str], prefix: str = "", about: str = ""
    ) -> frozenset[str]:
        assert set(targets) == {"vda", "sda"}
        of = {name for name in self.known if self.about.get(name, about) == about}
        return frozenset(name for name in of if name.startswith(prefix))

    async def keep_only(
        self, _uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = ""
    ) -> None:
        gone = {drop} if bitmaps is None else {n for n in self.known if n.startswith(prefix)}
        self.known = self.known - (gone - set(bitmaps or ()))

    async def served(self, _uid: str, reading: str) -> bool:
        if self.served_error is not None:
            raise self.served_error
        return not self.lost and self._has(reading)

    def _has(self, reading: str) -> bool:
        return self.serves and self.reading is not None and self.reading.id == reading

    async def end(self, _uid: str, reading: str = "", *, off: bool = False) -> bool:
        if self.served_error is not None:
            raise self.served_error
        if not self.lost and (not reading or self._has(reading)):
            self.serves = False
        return off or not self.lost

    async def backup_pins(self) -> set[tuple[str, str]]:
        if self.pins_error is not None:
            raise self.pins_error
        return {(VM, pin.rpartition(".")[2]) for pin in self.pins}


class Servers:
    """The port of readings, whose `begin` is another one than that of backups."""

    def __init__(self, guest: ReadGuest) -> None:
        self._guest = guest
        self.served, self.end = guest.served, guest.end

    async def begin(self, _uid: str, reading: Reading) -> None:
        guest = self._guest
        assert set(reading.files.values()) <= guest.pins
        guest.frozen_at_begin, guest.reading = guest.frozen, reading
        if guest.begin_error is not None:
            raise guest.begin_error
        guest.known.add(reading.bitmap)
        guest.about[reading.bitmap] = reading.about
        guest.serves = True
        if guest.answer_error is not None:
            raise guest.answer_error


@dataclass
class Scratch:
    """The files that imaged has staged, and the error of its next answer."""

    staged: dict[str, int] = field(default_factory=dict)
    error: VirtbusError | None = None
    away: VirtbusError | None = None
    """The error of its next answer to a cancel."""


class ReadSite(Site):
    """A runner whose VM runs, and imaged, which stages files."""

    def __init__(self) -> None:
        self.guest = ReadGuest()
        self.scratch = Scratch()
        self.asked: dict[str, Any] = {}
        super().__init__()
        self.vms = {VM: Running()}

    def restart(self) -> None:
        guest: Any = self.guest
        tools = SimpleNamespace(
            layers=guest,
            disks=guest,
            freezes=guest,
            backups=guest,
            bus=self.bus,
            reads=Servers(self.guest),
        )
        live = LiveWork(reads=LiveReads(cast("AgentPorts", tools)))
        states: Any = lambda: self.vms.values()  # noqa: E731
        self.runner = OperationRunner(self.bus, NODE, states, lambda: True, live)
        self.runner.list_begins()
        for entry in self.records.values():
            self.runner.take(entry)
        self.runner.list_ends()

    async def answer(self, request: Request) -> WorkState:
        want = validate(ScratchWork, request.data)
        if want.do == "cancel":
            if self.scratch.away is not None:
                raise self.scratch.away
            self.scratch.staged.clear()
            return WorkState(state="none")
        if self.scratch.error is not None:
            raise self.scratch.error
        if want.stage:
            self.scratch.staged = {disk.name: disk.size_bytes for disk in want.disks}
        return WorkState(state="working", step="serve")

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[None]:
        endpoint = Endpoint("scratch", subjects.rpc(NODE, "imaged", "scratch"), self.answer)
        async with self.bus.serve(ServiceInfo("virtbus-imaged", "1"), [endpoint]):
            fields: dict[str, Any] = {"kind": "serve", "disk": "", "within_s": 3600}
            self.asked = fields | more
            await self.put(**self.asked)
            yield

    async def change(self, **more: Any) -> None:
        """Change the record, as a controller does."""
        self.asked |= more
        await self.put(**self.asked)

    async def after(self, rounds: int = 1) -> OperationStatus:
        for _ in range(rounds):
            await self.runner.round()
        return await self.status()

    async def refused(self) -> str:
        """Return the reason of a failure; nothing of the reading is left."""
        status = await self.after()
        assert status.error is not None, status
        self.nothing_left()
        assert read_bitmap(ID) not in self.guest.known
        return status.error.reason

    def nothing_left(self) -> None:
        guest = self.guest
        assert (guest.serves, guest.pins, self.scratch.staged) == (False, set(), {})
        assert not guest.frozen


@pytest.fixture
def site() -> ReadSite:
    return ReadSite()


async def test_a_reader_has_all_disks_until_it_finishes(site: ReadSite) -> None:
    site.guest.known = {read_bitmap(EARLIER), BACKUP}
    async with site.running(since=EARLIER):
        status = await site.after()
        assert (status.phase, status.step) == ("Running", "serve")
        assert site.scratch.staged == {"root": 8 * MIB, "data": 5 * MIB}
        assert site.guest.reading is not None
        assert site.guest.reading.exports == {"vda": "root", "sda": "data"}
        assert site.guest.reading.since == read_bitmap(EARLIER)
        assert (site.guest.frozen_at_begin, site.guest.frozen) == (True, False)
        assert (await site.after(2)).step == "serve"
        await site.change(finish=True)
        assert (await site.after()).phase == "Succeeded"
    site.nothing_left()
    assert site.guest.known == {read_bitmap(ID), BACKUP}


async def test_a_cancel_leaves_the_bitmap_of_the_reading_before(site: ReadSite) -> None:
    site.guest.known = {read_bitmap(EARLIER)}
    async with site.running(since=EARLIER):
        await site.after()
        await site.change(cancel=True)
        assert (await site.after()).phase == "Cancelled"
    site.nothing_left()
    assert site.guest.known == {read_bitmap(EARLIER)}


async def test_a_reader_that_takes_too_long_is_ended(site: ReadSite) -> None:
    async with site.running(within_s=0):
        await site.after()
        assert await site.refused() == "read_timeout"


async def test_a_full_disk_ends_the_reading_before_the_guest_is_hurt(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.scratch.error = VirtbusError(Code.UNAVAILABLE, "disk_full", "below the floor")
        assert await site.refused() == "disk_full"


async def test_a_bitmap_that_a_disk_lacks_is_no_parent(site: ReadSite) -> None:
    site.guest.known = {BACKUP}
    async with site.running(since=uid(8)):
        assert await site.refused() == "no_parent"
    assert site.guest.known == {BACKUP}


async def test_an_agent_that_restarts_serves_on(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.restart()
        assert (await site.after()).step == "serve"
        await site.change(finish=True)
        site.restart()
        assert (await site.after()).phase == "Succeeded"
    site.nothing_left()


async def test_an_agent_that_died_after_the_end_repeats_it(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        await site.change(finish=True)
        site.guest.serves = False  # the agent before has ended the server
        site.restart()
        assert (await site.after()).phase == "Succeeded"
    assert site.guest.known == {read_bitmap(ID)}


async def test_a_server_that_another_reading_left_is_ended_first(site: ReadSite) -> None:
    site.guest.reading = Reading(uid(7), {}, {}, "", read_bitmap(uid(7)))
    site.guest.serves = True
    async with site.running():
        assert (await site.after()).step == "serve"
        assert (site.guest.reading.id, site.guest.serves) == (ID, True)


async def test_a_guest_that_ends_fails_the_reading(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.guest.serves, site.vms = False, {VM: Machine(phase="stopped")}
        assert await site.refused() == "guest_ended"


async def test_a_vm_that_is_off_is_not_read(site: ReadSite) -> None:
    site.vms = {VM: Machine(phase="stopped")}
    async with site.running():
        assert await site.refused() == "vm_off"


async def test_a_refusal_of_libvirt_leaves_nothing(site: ReadSite) -> None:
    site.guest.begin_error = FAILED
    async with site.running():
        assert await site.refused() == "libvirt_failed"


async def test_a_lost_answer_of_libvirt_loses_no_remark_about_the_freeze(site: ReadSite) -> None:
    site.guest.agent, site.guest.answer_error = False, DOWN
    async with site.running():
        assert (await site.after(2)).step == "serve"
        await site.change(finish=True)
        assert "not frozen" in (await site.after()).message
    site.nothing_left()


async def test_libvirt_that_is_away_delays_each_step(site: ReadSite) -> None:
    async with site.running():
        site.guest.begin_error = DOWN
        assert (await site.after()).step == ""
        site.guest.begin_error = None
        assert (await site.after()).step == "serve"
        site.guest.served_error = DOWN
        await site.change(cancel=True)
        assert (await site.after()).phase == "Running"
        assert site.guest.serves
        site.guest.served_error = None
        assert (await site.after()).phase == "Cancelled"
    site.nothing_left()


def test_the_request_names_each_disk_and_its_bitmap() -> None:
    text = reading_xml(XML, {"vda": "/scratch"}, {"vda": "root"}, f"{READ_BITMAP}x", "/nbd.sock")
    assert served_socket(text) == "/nbd.sock"
    assert f"<incremental>{READ_BITMAP}x</incremental>" in text
    assert 'name="vda" backup="yes" type="file" exportname="root" exportbitmap="changes"' in text
    assert '<disk name="sda" backup="no" />' in text
    assert "exportbitmap" not in reading_xml(XML, {"vda": "/s"}, {"vda": "root"}, "", "/nbd.sock")
    assert served_socket("<domainbackup mode='push'/>") == ""


async def test_a_finish_goes_before_the_reading_that_waits(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        await site.put(number=11, **site.asked)
        assert (await site.after()).phase == "Running"
        await site.change(finish=True)
        assert (await site.after()).phase == "Succeeded"
        assert site.guest.known == {read_bitmap(ID)}
        await site.after()
        assert (site.guest.serves, (await site.status(11)).step) == (True, "serve")
        await site.put(number=11, **site.asked)
        await site.after()
    site.nothing_left()
    assert site.guest.known == {read_bitmap(uid(11))}


async def test_the_end_of_a_reading_does_not_concern_the_server_of_another(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.guest.reading = Reading(uid(7), {}, {}, "", read_bitmap(uid(7)))
        await site.change(cancel=True)
        assert (await site.after()).phase == "Cancelled"
    assert site.guest.serves


async def test_a_snapshot_of_a_volume_waits_for_the_reading_of_its_guest(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        more = {"kind": "snapshot", "resource": "volume", "uid": REF["uid"], "ref": REF}
        await site.put(number=11, **more, disk="", snapshot=TAKEN)
        await site.after(2)
        assert (await site.status(11)).phase == "Accepted"
        await site.change(finish=True)
        assert (await site.after()).phase == "Succeeded"
        with suppress(AssertionError):  # nobody answers for imaged
            await site.after()
        assert (await site.status(11)).phase == "Running"


async def test_a_bitmap_of_another_volume_with_the_disks_name_is_no_parent(site: ReadSite) -> None:
    site.guest.known = {read_bitmap(EARLIER)}
    site.guest.about = {read_bitmap(EARLIER): f"data={uid(6)} root="}
    async with site.running(since=EARLIER):
        assert await site.refused() == "no_parent"
    assert site.guest.known == {read_bitmap(EARLIER)}


async def test_a_bitmap_of_the_same_volumes_is_a_parent(site: ReadSite) -> None:
    site.guest.known = {read_bitmap(EARLIER)}
    site.guest.about = {read_bitmap(EARLIER): f"data={REF['uid']} root="}
    async with site.running(since=EARLIER):
        assert (await site.after()).step == "serve"


async def test_a_guest_that_libvirt_has_lost_may_still_serve(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.guest.lost = True
        for more in ({}, {"cancel": True}):
            await site.change(**more)
            status = await site.after(2)
            assert (status.phase, "libvirt does not know" in status.message) == ("Running", True)
            assert (site.guest.pins, site.scratch.staged) != (set(), {})
        site.guest.lost = False
        assert (await site.after()).phase == "Cancelled"
    site.nothing_left()


async def test_a_lost_guest_whose_end_is_seen_fails_the_reading(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.guest.lost = True
        await site.after()
        site.guest.serves, site.vms = False, {VM: Machine(phase="stopped")}
        assert await site.refused() == "guest_ended"


async def test_an_agent_that_restarts_in_the_first_step_waits_for_its_comparison(
    site: ReadSite,
) -> None:
    async with site.running():
        site.guest.begin_error = DOWN
        await site.after()
        site.guest.begin_error, site.vms = None, {VM: Machine(phase="new", powered=True)}
        site.restart()
        assert (await site.after()).phase == "Running"
        site.vms = {VM: Running()}
        assert (await site.after()).step == "serve"


async def test_the_reason_of_a_failure_stays_while_a_helper_is_away(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.scratch.error = VirtbusError(Code.UNAVAILABLE, "disk_full", "below the floor")
        site.guest.served_error = None
        site.scratch.away = VirtbusError(Code.UNAVAILABLE, "recovering", "imaged starts")
        assert (await site.after()).phase == "Running"
        assert not site.guest.serves
        site.scratch.error = site.scratch.away = None
        assert await site.refused() == "disk_full"


async def test_a_reading_without_an_operation_is_ended_at_the_first_list(site: ReadSite) -> None:
    async with site.running():
        await site.after()
        site.records.clear()
        site.guest.served_error = DOWN
        site.restart()
        site.guest.pins_error = OSError(errno.EIO, "of the disk")
        await site.runner.round()
        site.guest.pins_error = None
        await site.runner.round()
        assert site.guest.pins
        site.guest.served_error, site.guest.lost = None, True
        await site.runner.round()
        assert site.guest.pins
        site.guest.lost = False
        await site.runner.round()
    assert (site.guest.serves, site.guest.pins) == (False, set())
