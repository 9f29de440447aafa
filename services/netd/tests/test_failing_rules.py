"""Rules of a running guest that its host cannot apply, and what happens to the other guests."""

import asyncio
import errno
from ipaddress import IPv4Interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from services.netd.tests.pretended_host import make_record
from services.netd.tests.test_network_objects import A, B, target

from virtbus.bus.runtime.tasks import background
from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core import node_groups
from virtbus.netd.core.attachment import Attachment, CniState, NicKind
from virtbus.netd.core.dhcp import DhcpLease
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge import filters, group_filters, guest_links
from virtbus.netd.edge.groups_store import GroupsStore
from virtbus.netd.edge.guest_links import GuestLinks
from virtbus.netd.network_entry import NetworkEntry
from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.netd.security_groups import SecurityGroups
from virtbus.netd.segment_guests import SegmentGuests
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import NetPhase, NetReady

NO_FILTER = VirtbusError(Code.UNSUPPORTED, "no_bridge_filter", "load br_netfilter")


class Refusing:
    """Attachments that are ready; the rules of some cannot be applied."""

    def __init__(self, *ready: Attachment, refuses: str) -> None:
        self._ready = ready
        self._refuses = refuses
        self.amended: list[str] = []
        self.building: set[str] = set()

    def ready(self) -> list[Attachment]:
        return list(self._ready)

    def begun(self) -> set[str]:
        return self.building

    async def amend(self, uid: str, _change: Any) -> None:
        if uid == self._refuses:
            raise NO_FILTER
        self.amended.append(uid)


async def test_a_guest_whose_rules_are_refused_keeps_no_other_from_the_rules_of_reach() -> None:
    ready = [plan_of(make_record(uid, **target("bridge", link="br0"))) for uid in (A, B)]
    there = Refusing(*ready, refuses=A)
    doors = cast("HostPorts", MagicMock())
    guests = SegmentGuests(doors, cast("Attachments", there))
    await guests.guard()
    assert there.amended == [B]


def test_only_a_caller_that_adds_no_interface_keeps_a_running_guest_without_its_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "guard", lambda *_: None)
    monkeypatch.setattr(group_filters, "guard", MagicMock(side_effect=NO_FILTER))
    monkeypatch.setattr(guest_links, "_running", lambda *_: True)
    made = GuestLinks(MagicMock(), MagicMock(), MagicMock())
    vm = plan_of(make_record(A))
    made._guard_first(MagicMock(), vm, keeps_running=True)
    with pytest.raises(VirtbusError, match="br_netfilter"):
        made._guard_first(MagicMock(), vm, keeps_running=False)


async def test_a_label_change_is_refused_until_its_rules_are_in_force() -> None:
    attachments = Attachments(MagicMock(), MagicMock())
    attachments.recovering = False
    builder = attachments._builder = MagicMock(insistent=set())
    builder.found = builder.completes = AsyncMock(return_value=True)
    builder.guard = AsyncMock(side_effect=[NO_FILTER, NO_FILTER, None])
    attachments._hot = MagicMock(in_use=AsyncMock(return_value=True))
    running = plan_of(make_record(A, labels={}))
    attachments._entries[A] = NetworkEntry(running, NetPhase.READY)
    wanted = make_record(A, labels={"app": "web"})
    for _attempt in range(2):
        with pytest.raises(VirtbusError, match="br_netfilter"):
            await attachments.ensure(wanted)
    for _attempt in range(2):
        assert (await attachments.ensure(wanted)).phase is NetPhase.READY
    assert builder.guard.await_count == 3


def test_groups_may_change_while_a_thread_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    book = NodeGroupBook()
    book.groups["a"] = book.groups["b"] = MagicMock()

    def selected(*_: Any) -> bool:
        book.groups.pop("b", None)
        return False

    monkeypatch.setattr(node_groups, "selects", selected)
    assert book.of_vm(plan_of(make_record(A))) == []


async def test_rules_are_applied_although_their_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    there = Refusing(plan_of(make_record(A)), refuses="")
    doors = cast("HostPorts", SimpleNamespace(groups=NodeGroupBook()))
    store = GroupsStore(tmp_path)
    groups = SecurityGroups("n1", doors, cast("Attachments", there), store)
    monkeypatch.setattr(store, "remover", lambda _: full)
    groups._save({"a"})
    async with asyncio.timeout(5), background() as tasks:
        tasks.start(groups.run())
        while not there.amended:
            await asyncio.sleep(0.01)


async def test_a_change_during_a_build_is_applied_when_the_network_is_ready(tmp_path: Path) -> None:
    there = Refusing(refuses="")
    there.building = {A}
    doors = cast("HostPorts", SimpleNamespace(groups=NodeGroupBook()))
    groups = SecurityGroups("n1", doors, cast("Attachments", there), GroupsStore(tmp_path))
    assert await groups._apply()
    there.building, there._ready = set(), (plan_of(make_record(A)), plan_of(make_record(B)))
    groups._built(B)
    assert not groups._changed.is_set(), "it was not there: its build had the change"
    groups._built(A)
    assert groups._changed.is_set()


async def test_a_release_whose_rules_fail_leaves_no_mac_in_use() -> None:
    doors = MagicMock()
    attachments = Attachments(doors, MagicMock())
    attachments.recovering = False
    attachments._builder = MagicMock(unmake=AsyncMock(), runs=AsyncMock(return_value=False))
    vm = plan_of(make_record(A, networks=("lan",)))
    cni = CniState(conflist={"name": "lan", "plugins": []})
    vm = vm.with_nics(nic.model_copy(update={"kind": NicKind.CNI, "cni": cni}) for nic in vm.nics)
    attachments._entries[A] = NetworkEntry(vm, NetPhase.READY)
    attachments._used.put(A, vm.nics)
    doors.attachers.plugin_reach.sync.side_effect = OSError(errno.EBUSY, "no")
    with pytest.raises(OSError, match="no"):
        await attachments.release(A, 1)
    assert not attachments._used.has_mac(vm.nics[0].mac, but=B)
    assert attachments.untidy.is_set()


async def test_a_refused_plan_leaves_no_network_that_seems_ready() -> None:
    doors = MagicMock()
    attachments = Attachments(doors, MagicMock())
    attachments.recovering = False
    builder = attachments._builder = MagicMock(insistent=set(), unmake=AsyncMock())
    builder.found = AsyncMock(return_value=False)
    attachments._hot = MagicMock(is_bare=AsyncMock(return_value=False))
    attachments._entries[A] = entry = NetworkEntry(plan_of(make_record(A)))
    entry.settle(NetPhase.READY)
    doors.attachers.plan.side_effect = NO_FILTER
    builder.runs = AsyncMock(return_value=False)
    with pytest.raises(VirtbusError, match="br_netfilter"):
        await attachments.ensure(make_record(A, generation=2))
    assert attachments.ready() == []
    with pytest.raises(VirtbusError, match="start it again"):
        await attachments.take_taps(A, 0.1)


async def test_a_lease_whose_rules_fail_is_reported_because_it_is_stored() -> None:
    doors = MagicMock()
    attachments = Attachments(doors, MagicMock())
    builder = attachments._builder = MagicMock()
    builder.found = AsyncMock(return_value=True)
    builder.guard = AsyncMock(side_effect=NO_FILTER)
    plan = plan_of(make_record(A, **target("bridge", link="br0")))
    attachments._entries[A] = NetworkEntry(plan, NetPhase.READY)
    doors.bridge.reach = ReachRules()
    guests = SegmentGuests(doors, attachments)
    guests._see(A, 0, DhcpLease(IPv4Interface("192.0.2.7/24"), None))
    sent: asyncio.Queue[NetReady] = asyncio.Queue()
    async with asyncio.timeout(5), background() as tasks:
        tasks.start(guests.run())
        tasks.start(guests.report(sent.put))
        (interface,) = (await sent.get()).interfaces
    assert interface.addresses == ("192.0.2.7/24",)


async def test_a_repair_removes_no_bridge_that_a_vm_began_to_use_while_it_waited() -> None:
    doors, nics = MagicMock(), list[str]()
    attachments = MagicMock(replug=AsyncMock(), compare=AsyncMock(), recovering=False)
    attachments.host_side, attachments.nics = asyncio.Lock(), lambda: nics
    bridges = doors.attachers.bridges
    bridges.built_in.former.return_value = []
    bridges.needed.side_effect = lambda used: [(bridges.built_in, bool(used))]
    audit = OrphanAudit(doors, attachments)
    async with asyncio.TaskGroup() as group, attachments.host_side:
        mending = group.create_task(audit.mend())
        await asyncio.wait([mending], timeout=0.1)
        nics.append("of a VM that has just started")
    bridges.remove.assert_not_called()
    nics.clear()
    await audit.mend()
    bridges.remove.assert_called_once()
