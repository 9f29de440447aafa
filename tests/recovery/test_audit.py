"""Objects on a host without a record are reported; a running guest continues (ADR 0033)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid
from tests.recovery.test_rebuild import ask, controller, node_says

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.errors import UnavailableError
from virtbus.nodeagent import audit
from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeAudited, NodeFindings
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeState
from virtbus.schemas.node_rpc import HeldResources, Inspect, Release, ReleaseReply
from virtbus.schemas.records import DELETED
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import encode, validate
from virtbus.simulator.services import SimulatedNode

A, LEFT, FOREIGN = uid(1), uid(7), uid(8)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LOOK_AGAIN_S", 0.05)


async def audited(client: MemoryBus, **data: Any) -> NodeFindings:
    async def known() -> bool:
        return bool((await ask(client, "node.list"))["items"])

    await eventually(known)
    (found,) = validate(NodeAudited, await ask(client, "node.audit", **data)).nodes
    return found


async def leave_all(node: Node, state: DomainState = DomainState.SHUT_OFF) -> None:
    """Make one object of each kind without a record, and objects of another instance.

    The guest ran, so its disk has writes.
    """
    node.domains.set(LEFT, state)
    node.domains.set(FOREIGN, DomainState.RUNNING)
    node.domains.foreign.add(FOREIGN)
    node.simulated.held[LEFT] = 1
    node.simulated.disks.add(LEFT)
    node.simulated.armed.append(LEFT)
    folder = node.settings.state_dir / "vms" / LEFT
    folder.mkdir()
    (folder / "seed-x.iso").touch()
    (node.settings.state_dir / "consoles" / f"{LEFT}.log").touch()
    status = VmStatus(uid=LEFT, node=NODE, epoch=1, generation=1, state=VmState.RUNNING)
    await node.bus.put(subjects.vm_status(NODE, LEFT), encode(status))


async def one_vm(node: Node) -> None:
    async def running() -> bool:
        return await node.state(A) == "Running"

    await node_says(node, NodeState.READY)
    await node.put(record(1))
    await eventually(running)


async def test_a_host_with_only_its_vms_has_no_findings(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        assert await audited(client) == NodeFindings(node=NODE)
        assert await audited(client, node=NODE, repair=True) == NodeFindings(node=NODE)


async def test_each_object_without_a_record_is_reported_and_repaired(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        await leave_all(node)
        found = await audited(client)
        kinds = sorted(finding.kind for finding in found.findings)
        assert kinds == ["disk", "domain", "file", "file", "network", "status"]
        assert {finding.uid for finding in found.findings} == {LEFT}
        assert all(finding.repair and not finding.repaired for finding in found.findings)
        assert LEFT in node.domains.there  # only reported

        repaired = await audited(client, repair=True)
        assert all(finding.repaired for finding in repaired.findings)
        assert await audited(client) == NodeFindings(node=NODE)
        assert set(node.domains.there) == {A, FOREIGN}
        assert node.domains.done == [("start", A)]
        assert list(node.simulated.kept) == [LEFT]
        assert (node.settings.state_dir / "quarantine" / LEFT / "seed-x.iso").exists()


async def test_a_status_that_cannot_be_purged_is_not_called_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_of: object) -> None:
        raise UnavailableError("no leader")

    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        await leave_all(node)
        monkeypatch.setattr(audit, "purge_status", refuse)
        found = (await audited(client, repair=True)).findings
        assert {one.kind for one in found if not one.repaired} == {"status"}


async def test_nothing_counts_as_repaired_while_a_service_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """netd refuses the release, and does not answer the scan after it."""
    inspect, refusals = SimulatedNode.inspect, []

    def refuse(_self: SimulatedNode, want: Release) -> ReleaseReply:
        refusals.append(want.uid)
        raise VirtbusError(Code.UNAVAILABLE, "recovering", "not yet")

    def answer(self: SimulatedNode, want: Inspect) -> HeldResources:
        if refusals:
            raise VirtbusError(Code.UNAVAILABLE, "recovering", "not yet")
        return inspect(self, want)

    monkeypatch.setattr(SimulatedNode, "release", refuse)
    monkeypatch.setattr(SimulatedNode, "inspect", answer)
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        node.simulated.held[LEFT] = 1
        found = (await audited(client, repair=True)).findings
        assert refusals == [LEFT]
        assert {one.repaired for one in found} == {False}


async def test_a_running_guest_without_a_record_is_reported_and_never_removed(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, resync_s=0.05, orphan_grace_s=0.1)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        await leave_all(node, DomainState.RUNNING)
        await asyncio.sleep(0.5)  # graces and sweeps later
        found = await audited(client, repair=True)
        assert {one.kind for one in found.findings} >= {"disk", "domain", "file", "network"}
        assert not any(one.repair or one.repaired for one in found.findings)
        assert node.domains.there[LEFT].state is DomainState.RUNNING
        assert LEFT in node.simulated.held
        assert (node.settings.state_dir / "vms" / LEFT / "seed-x.iso").exists()


async def test_a_failed_removal_is_retried_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair does not wait for the next full comparison, which is minutes away."""
    monkeypatch.setattr(audit, "RETRY_S", (0.05, 0.1))
    lost: list[str] = []
    release = SimulatedNode.release

    def first_is_lost(self: SimulatedNode, want: Release) -> ReleaseReply:
        if not lost:
            lost.append(want.uid)
            raise VirtbusError(Code.UNAVAILABLE, "recovering", "not yet")
        return release(self, want)

    monkeypatch.setattr(SimulatedNode, "release", first_is_lost)
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        await node.start_another()
        node.simulated.held[LEFT] = 1
        await node.bus.purge(subjects.vm_record(NODE, LEFT), marker_ttl_s=60)

        async def removed() -> bool:
            return LEFT not in node.simulated.held

        await eventually(removed)
        assert lost


async def test_missing_parts_of_a_network_are_reported_and_netd_repairs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {A: ("tap0 is gone",), "": ("nftables virtbus: gone",)}

    def inspect(self: SimulatedNode, want: Inspect) -> HeldResources:
        if want.mend:
            faults.clear()
        return HeldResources(things=dict.fromkeys(self.held, ("simulated",)), faults=faults)

    monkeypatch.setattr(SimulatedNode, "inspect", inspect)
    node = Node(tmp_path, resync_s=0.05, orphan_grace_s=0.1)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        found = (await audited(client)).findings
        # imaged and netd of a simulated node are one process
        assert {(each.kind, each.uid, each.what, each.repair) for each in found} == {
            ("fault", A, "tap0 is gone", "netd repairs it"),
            ("fault", "", "nftables virtbus: gone", "netd repairs it"),
        }
        assert faults, "only told"
        repaired = await audited(client, repair=True)
        assert all(finding.repaired for finding in repaired.findings)
        assert await audited(client) == NodeFindings(node=NODE)
        assert set(node.domains.there) == {A}


async def test_an_orphan_is_removed_after_its_grace_except_its_disks(tmp_path: Path) -> None:
    node = Node(tmp_path, resync_s=0.05, orphan_grace_s=0.3)
    await node.join()
    async with node.agent():
        await one_vm(node)
        await leave_all(node)
        await eventually(lambda: set(node.domains.there) == {A, FOREIGN})
        await eventually(lambda: not (node.settings.state_dir / "vms" / LEFT).exists())
        await eventually(lambda: LEFT not in {*node.simulated.held, *node.simulated.disks})
        assert list(node.simulated.kept) == [LEFT]


@pytest.mark.parametrize(("why", "kept"), [(b"", [LEFT]), (DELETED, [])])
async def test_preparations_for_a_record_purged_unseen_are_removed_at_once(
    tmp_path: Path, why: bytes, kept: list[str]
) -> None:
    """Disks with writes are removed only by a delete."""
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        await one_vm(node)
        node.simulated.held[LEFT] = 1
        node.simulated.disks.add(LEFT)
        node.simulated.armed.append(LEFT)
        await node.bus.purge(subjects.vm_record(NODE, LEFT), marker_ttl_s=60, why=why)
        await eventually(lambda: LEFT not in {*node.simulated.held, *node.simulated.disks})
        assert A in node.simulated.held
        assert list(node.simulated.kept) == kept
    async with node.agent():  # and as an agent that finds the marker in its first list
        node.simulated.held[LEFT] = 1
        await eventually(lambda: LEFT not in node.simulated.held)


async def test_on_another_bus_nothing_counts_as_an_orphan(tmp_path: Path) -> None:
    node = Node(tmp_path, resync_s=0.05, orphan_grace_s=0.1)
    await node.join()
    async with node.agent():
        await one_vm(node)
    await node.other_bus()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        await leave_all(node)
        found = await audited(client, repair=True)
        assert [finding.kind for finding in found.findings] == ["bus"]
        assert {A, LEFT} <= set(node.domains.there)


async def test_a_vm_without_a_record_is_a_finding_that_repair_leaves_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, resync_s=0.05)
    await node.join()
    async with node.agent(), controller(node) as client:
        await one_vm(node)
        del node.server.shelf("$KV.vm.x").entries[subjects.vm_record(NODE, A)]

        async def held() -> bool:
            return bool((await audited(client)).findings)

        await eventually(held)
        found = await audited(client, repair=True)
        (finding,) = [one for one in found.findings if one.kind == "record"]
        assert "virtbus bus rebuild" in finding.what
        assert A in node.domains.there
