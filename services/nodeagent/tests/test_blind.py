"""While libvirt does not answer, guests' states are unknown, and the node reports it (I9)."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import Domains, Node, eventually, in_state, record, uid

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainFacts, DomainState, Ending
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node import NodeState

A = uid(1)


class Away(Domains):
    """libvirtd that stops and restarts."""

    here = True

    async def list_domains(self) -> list[DomainFacts]:
        if not self.here:
            raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")
        return await super().list_domains()

    def go(self) -> None:
        self.here = False
        self.tell(DomainEvent("", DomainChange.AWAY))

    def come(self) -> None:
        self.here = True
        self.tell(DomainEvent("", None))


async def running(node: Node) -> Away:
    node.domains = domains = Away()
    await node.join()
    await node.put(record(spec={"run_strategy": "Once"}))
    return domains


async def test_a_node_that_cannot_see_its_guests_is_recovering_until_it_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.nodeagent.domain_events.BLIND_AFTER_S", 0.05)
    node = Node(tmp_path)
    domains = await running(node)

    async def said(state: NodeState) -> bool:
        found = await node.liveness()
        return found is not None and found.state is state

    async with node.agent():
        await eventually(in_state(node, "Running"))
        assert await said(NodeState.READY)
        domains.go()
        domains.set(A, DomainState.SHUT_OFF, Ending.CRASHED)  # nobody receives the event
        await eventually(lambda: said(NodeState.RECOVERING))
        found = await node.liveness()
        assert found is not None
        assert "libvirt does not answer" in found.services["agent"].message
        assert await node.state(A) == "Running", "what it said last; controllers show Unknown"
        domains.come()
        await eventually(lambda: said(NodeState.READY))
        await eventually(in_state(node, "Failed"))


async def test_a_short_restart_of_libvirtd_is_not_reported(tmp_path: Path) -> None:
    node = Node(tmp_path)
    domains = await running(node)
    async with node.agent():
        await eventually(in_state(node, "Running"))
        domains.go()
        domains.come()
        await node.start_another()
        found = await node.liveness()
        assert found is not None
        assert found.state is NodeState.READY


async def test_a_list_failure_without_a_lost_connection_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.nodeagent.domain_events.BLIND_AFTER_S", 0.05)
    monkeypatch.setattr("virtbus.nodeagent.domain_events.AGAIN_S", 0.05)
    node = Node(tmp_path, compare_s=0.05)
    domains = await running(node)

    async def said(state: NodeState) -> bool:
        found = await node.liveness()
        return found is not None and found.state is state

    async with node.agent():
        await eventually(in_state(node, "Running"))
        domains.here = False
        await eventually(lambda: said(NodeState.RECOVERING))
        domains.here = True
        await eventually(lambda: said(NodeState.READY))
