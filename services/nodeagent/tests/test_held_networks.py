"""The network of a VM that is off: held and reported before the VM has a disk, and released."""

from pathlib import Path
from typing import Any

from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Ensure, ImageReady, NetReady
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import NETWORK_READY, Condition, VmStatus
from virtbus.simulator.services import SimulatedNode

A = uid(1)
ROOT = {"name": "root", "image": {"ref": "tiny"}}
DISKS: dict[str, Any] = {
    "volumes": [ROOT],
    "domain": {"devices": {"interfaces": [{"name": "net0"}], "disks": [{"name": "root"}]}},
}


def held(generation: int = 1, state: str = "Held", **more: Any) -> VmRecord:
    spec = {"run_strategy": "Manual", "network_state": state, **more.pop("spec", {})}
    return record(generation=generation, **{"powered": False, "spec": spec, **more})


def condition(status: VmStatus | None, generation: int) -> Condition | None:
    """The condition of the network in a status of this generation."""
    if status is None or status.generation != generation:
        return None
    return next((one for one in status.conditions if one.type == NETWORK_READY), None)


async def reached(node: Node, generation: int) -> tuple[Condition, VmStatus]:
    async def known() -> tuple[Condition, VmStatus] | None:
        status = await node.status(A)
        found = condition(status, generation)
        return None if found is None or status is None else (found, status)

    found: tuple[Condition, VmStatus] = await eventually(known)
    return found


async def test_the_address_of_a_held_network_is_reported_while_the_vm_is_off(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await node.join()
    await node.put(held())
    for _agent in range(2):  # an agent that restarts asks netd again
        async with node.agent():
            found, status = await reached(node, 1)
            assert (found.status, found.reason) == (True, "Held")
            assert status.interfaces[0].addresses
            assert status.state is VmState.STOPPED
    assert not node.domains.done


async def test_a_network_that_fails_is_reported_and_tried_again(tmp_path: Path) -> None:
    failing = True

    class Failing(SimulatedNode):
        def net(self, want: Ensure) -> NetReady:
            if failing:
                raise VirtbusError(Code.INTERNAL, "cni_failed", "the plugin said no")
            return super().net(want)

    node = Node(tmp_path)
    node.services = Failing
    await node.join()
    await node.put(held())
    async with node.agent():
        found, _ = await reached(node, 1)
        assert (found.status, found.reason) == (False, "cni_failed")
        assert "the plugin said no" in found.message
        failing = False

        async def mended() -> bool:
            return (await reached(node, 1))[0].status

        await eventually(mended)


async def test_a_released_network_has_no_address_until_it_is_held_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    await node.put(held())
    async with node.agent():
        await reached(node, 1)
        await node.put(held(2, "Released"))
        found, status = await reached(node, 2)
        assert (found.status, found.reason, status.interfaces) == (False, "Released", ())
        await node.put(held(3))
        found, status = await reached(node, 3)
        assert found.status
        assert status.interfaces[0].addresses


async def test_a_vm_that_gets_its_disk_while_it_is_off_starts_with_it(tmp_path: Path) -> None:
    """The report of its disks before it had any does not count."""
    images: list[int] = []

    class Counting(SimulatedNode):
        def image(self, want: Ensure) -> ImageReady:
            images.append(want.record.generation)
            return super().image(want)

    node = Node(tmp_path)
    node.services = Counting
    await node.join()
    await node.put(held())
    async with node.agent():
        await reached(node, 1)
        early = ImageReady(uid=A, epoch=1, generation=1)
        await MemoryBus(node.server, "imaged").publish(subjects.ready(NODE, A, "image"), early)
        await node.put(held(2, spec=DISKS))
        await reached(node, 2)
        await node.put(held(2, spec=DISKS, powered=True, power_epoch=1))
        await eventually(lambda: ("start", A) in node.domains.done)
        assert images == [2]
