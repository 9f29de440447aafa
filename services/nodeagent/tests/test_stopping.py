"""A stop during a start: at any point of libvirt's start, the guest ends and stays off."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import (
    NODE,
    Domains,
    Node,
    eventually,
    in_state,
    record,
    uid,
)

from virtbus.nodeagent.core.ports import NO_FILES, DomainChange, DomainEvent, DomainState
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Ensure, ImageReady
from virtbus.schemas.vm import VmRecord
from virtbus.simulator.services import SimulatedNode

A = uid(1)


class SlowToStart(Domains):
    """libvirt blocks a start, before or after the guest exists, until the test releases it."""

    def __init__(self, *, there: bool) -> None:
        super().__init__()
        self._there = there
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def start(
        self, of: str, *, paused: bool = False, files: Mapping[str, int] = NO_FILES
    ) -> None:
        if self._there:
            await super().start(of, paused=paused)
        self.asked.set()
        await self.go.wait()
        if not self._there:
            await super().start(of, paused=paused)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("there", [False, True])
async def test_a_stop_during_a_start_ends_that_starts_guest(node: Node, there: bool) -> None:
    node.domains = domains = SlowToStart(there=there)
    await node.join()
    await node.put(record())
    async with node.agent():
        await domains.asked.wait()
        await node.put(record(powered=False, power_epoch=2))
        await eventually(in_state(node, "Stopping"))
        domains.tell(DomainEvent(A, DomainChange.ENDED))  # of an earlier domain
        domains.go.set()
        await eventually(in_state(node, "Stopped"))
        await node.start_another()
        assert not domains.there[A].active
        assert await node.state(A) == "Stopped"
        assert domains.done.count(("start", A)) == 1


@pytest.mark.parametrize("told", [False, True])
async def test_a_stop_during_a_start_waits_until_libvirt_has_ended_that_start(
    node: Node, *, told: bool
) -> None:
    """The call exceeds its limit, and libvirt works on. `told`: libvirt reports an end before."""
    node.domains = domains = SlowToStart(there=False)
    domains.errors["start"] = VirtbusError(Code.UNAVAILABLE, "libvirt_late", "it took too long")
    await node.join()
    await node.put(record())
    async with node.agent():
        await domains.asked.wait()
        await node.put(record(powered=False, power_epoch=2))
        await eventually(in_state(node, "Stopping"))
        domains.late.add(A)
        if told:
            domains.tell(DomainEvent(A, DomainChange.START_FAILED))
        domains.go.set()

        async def waits() -> bool:
            found = await node.status(A)
            return found is not None and "libvirt has not ended an earlier" in found.message

        await eventually(waits)
        assert await node.state(A) == "Stopping"
        domains.set(A, DomainState.RUNNING)
        domains.late.clear()
        await eventually(in_state(node, "Stopped"))
        assert not domains.there[A].active


class Counting(SimulatedNode):
    """Counts the requests for disks."""

    asked = 0

    def image(self, want: Ensure) -> ImageReady:
        self.asked += 1
        return super().image(want)


async def exported(node: Node, vm: VmRecord) -> None:
    """Export the VM, which is off, and return when that has ended."""
    await node.export(vm)

    async def succeeded() -> bool:
        return await node.export_phase() == "Succeeded"

    await eventually(succeeded)


@pytest.mark.parametrize("changed", ["not", "by an operation", "by its record"])
async def test_a_start_of_a_vm_that_was_off_asks_for_disks_that_may_have_changed(
    node: Node, changed: str
) -> None:
    """imaged's answer waits until it has copied or replaced them (ADR 0048)."""
    node.services = Counting
    await node.join()
    await node.put(record(powered=False))
    async with node.agent():
        await eventually(in_state(node, "Stopped"))
        report = ImageReady(uid=A, epoch=1, generation=1)
        await node.bus.publish(subjects.ready(NODE, A, "image"), report)
        await node.start_another()
        if changed == "by an operation":
            await exported(node, record(powered=False))
        simulated = node.simulated
        assert isinstance(simulated, Counting)
        before = simulated.asked
        generation = 2 if changed == "by its record" else 1
        await node.put(record(power_epoch=2, generation=generation))
        await eventually(in_state(node, "Running"))
        assert simulated.asked - before == (changed != "not")


async def test_an_event_is_no_answer_to_a_start_of_a_vm_that_was_off(node: Node) -> None:
    """imaged may have published it before it got a request to copy the disks."""
    image = Dependency(node.bus, "imaged", ImageReady, record, lambda: None)
    event = ImageReady(uid=A, epoch=1, generation=1)
    image.reset(needs_answer=True)
    image.receive(event)
    assert image.latest is None
    async with SimulatedNode(node.bus, NODE).serve():
        assert (await image.get(record(), ask_after_s=0.0)).uid == A
    image.reset()
    image.receive(event)
    assert image.latest == event
