"""Rebuilding a bus that lost records from the hosts: controller and agents together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.provisioning import backup
from virtbus.controller.service import ControllerService
from virtbus.controller.settings import Settings
from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas import subjects
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.api import BusRebuilt
from virtbus.schemas.node import Drain, NodeSpec, NodeState
from virtbus.schemas.vm import NameClaim, VmRecord
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import encode, read, validate

A, B = uid(1), uid(2)


async def _declared() -> None:
    """The fake needs no declaration."""


@asynccontextmanager
async def controller(node: Node) -> AsyncIterator[MemoryBus]:
    """A controller on the node's bus, and a client's connection."""
    client = MemoryBus(node.server, "client")
    async with asyncio.TaskGroup() as group:
        serving = ControllerService(MemoryBus(node.server, "c1"), Settings(), _declared)
        task = group.create_task(serving.run())
        yield client
        task.cancel()


async def ask(client: MemoryBus, verb: str, **data: Any) -> Any:
    return await client.request(f"virtbus.api.v1.{verb}", data, timeout_s=10)


async def rebuild(client: MemoryBus, **data: Any) -> BusRebuilt:
    """The rebuild accepts n1 by a person's word: the test wrote its records, not a controller."""
    data.setdefault("accept_unsigned", [NODE])

    async def node_has_read_the_bus() -> bool:
        plan = validate(BusRebuilt, await ask(client, "bus.rebuild", dry_run=True))
        return bool(plan.nodes) and all("moment" not in one.message for one in plan.nodes)

    await eventually(node_has_read_the_bus)
    return validate(BusRebuilt, await ask(client, "bus.rebuild", **data))


async def states(node: Node, *uids: str) -> list[str]:
    return [await node.state(one) for one in uids]


async def on_bus(node: Node, of: str) -> VmRecord | None:
    entry = await node.bus.get(subjects.vm_anywhere(of))
    if entry is None or not entry.value:
        return None
    return read(VmRecord, entry.value).model_copy(update={"signature": ""})


async def is_gone(node: Node, of: str) -> bool:
    return await on_bus(node, of) is None


async def node_says(node: Node, state: NodeState) -> None:
    async def said() -> bool:
        found = await node.liveness()
        return found is not None and found.state is state

    await eventually(said)


async def two_vms(node: Node) -> None:
    """One running and one stopped VM; the agent has ended since."""
    await node.join()
    await node.put(record(1))
    await node.put(record(2))
    async with node.agent():

        async def running() -> bool:
            return await states(node, A, B) == ["Running", "Running"]

        await eventually(running)
        await node.put(record(2, powered=False, power_epoch=1))

        async def stopped() -> bool:
            return await node.state(B) == "Stopped"

        await eventually(stopped)

        async def on_disk() -> bool:
            return (await node.files.list())[B].power_epoch == 1

        await eventually(on_disk)
    node.domains.done.clear()


async def test_a_nodes_desired_state_is_restored_on_a_recreated_bus(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node_spec = NodeSpec(node=NODE, cordoned=True, draining=Drain(since_ns=1), lease_revision=7)
    await node.join()
    async with node.agent():
        await node_says(node, NodeState.READY)
        await node.bus.put(subjects.node_spec(NODE), encode(node_spec))
        await eventually(lambda: node.files.node_spec() == node_spec)
    await node.other_bus()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        await rebuild(client)
        await node_says(node, NodeState.READY)
        there = await node.bus.get(subjects.node_spec(NODE))
        assert there is not None
        assert read(NodeSpec, there.value) == node_spec.model_copy(update={"lease_revision": 0})
        assert (await ask(client, "vm.create", name="web", image="tiny"))["vm"]["node"] == "_"
        await ask(client, "node.uncordon", node=NODE)
        await eventually(lambda: node.files.node_spec() is None)
        await rebuild(client)
        assert not (await ask(client, "node.get", node=NODE))["node"]["node_spec"].get("cordoned")


async def test_an_empty_bus_is_rebuilt_and_nothing_is_started_or_ended(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await two_vms(node)
    await node.other_bus()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        planned = await rebuild(client, dry_run=True)
        assert [vm.step for vm in planned.vms] == ["add", "add"]
        assert await on_bus(node, A) is None
        done = await rebuild(client)
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "add"), (B, "add")]
        assert [(one.node, one.joined, one.vms) for one in done.nodes] == [(NODE, True, 2)]
        await node_says(node, NodeState.READY)
        assert await on_bus(node, A) == record(1)
        assert await on_bus(node, B) == record(2, powered=False, power_epoch=1)
        assert (await ask(client, "vm.get", name="vm-1"))["uid"] == A  # and the name is claimed
        again = await rebuild(client)
        assert (again.vms, again.kept) == ((), 2)
        await ask(client, "vm.start", name="vm-2")
        await eventually(lambda: node.domains.done == [("start", B)])


async def test_an_empty_bus_is_rebuilt_with_the_volumes_of_its_vms(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ref = VolumeRef(uid=uid(9), namespace="default", name="data", size_bytes=2**30)
    await node.join()
    spec = {"volumes": [{"name": "data", "volume": {"name": "data"}}]}
    await node.put(record(1, volume_refs={"data": ref}, spec=spec))
    async with node.agent():

        async def running() -> bool:
            return await states(node, A) == ["Running"]

        await eventually(running)
    await node.other_bus()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        done = await rebuild(client)
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "add")]
        view = await ask(client, "volume.get", name="data")
        assert (view["uid"], view["state"], view["holder"]) == (uid(9), "InUse", A)


async def test_an_empty_bus_is_rebuilt_with_the_networks_and_addresses_of_its_vms(
    tmp_path: Path,
) -> None:
    node, address = Node(tmp_path), "10.9.0.7"
    network = {"kind": "isolated", "subnet": "10.9.0.0/24", "pool": "fleet"}
    target = {"uid": uid(9), "namespace": "default", "name": "blue", "spec": network}
    spec = {
        "networks": [{"name": "net0", "network": "blue"}],
        "domain": {"devices": {"interfaces": [{"name": "net0"}]}},
    }
    claims = {"net0": {"network": uid(9), "addresses": [address]}}
    await node.join()
    await node.put(record(1, network_targets={"blue": target}, address_claims=claims, spec=spec))
    async with node.agent():

        async def running() -> bool:
            return await states(node, A) == ["Running"]

        await eventually(running)
    await node.other_bus()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        done = await rebuild(client)
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "add")]
        view = await ask(client, "network.get", name="blue")
        assert (view["uid"], view["user_count"], view["given"]) == (uid(9), 1, 1)
        claim = await node.bus.get(subjects.address_claim(uid(9), address))
        assert claim is not None
        assert read(AddressClaim, claim.value).vm == A


async def test_a_single_lost_record_is_restored_and_its_vm_resumes(tmp_path: Path) -> None:
    node = Node(tmp_path, resync_s=0.05)
    await two_vms(node)
    del node.server.shelf("$KV.vm.x").entries[subjects.vm_record(NODE, A)]
    node.domains.set(A, DomainState.SHUT_OFF)
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.READY)
        done = await rebuild(client)
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "add")]
        await eventually(lambda: node.domains.done == [("start", A)])


async def test_a_deleted_vm_of_an_old_backup_does_not_come_back(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await two_vms(node)
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.READY)
        await ask(client, "vm.delete", name="vm-1", grace_s=0)
        await eventually(lambda: is_gone(node, A))
    await node.other_bus()
    await node.put(record(1))  # as the backup has it
    await node.put(record(2))
    node.domains.done.clear()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        node.simulated.held[A] = 1  # imaged and netd have made the objects of the restored record
        done = await rebuild(client)
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "end"), (B, "raise")]
        await node_says(node, NodeState.READY)
        await eventually(lambda: is_gone(node, A))
        assert A not in node.simulated.held
        assert await on_bus(node, B) == record(2, powered=False, power_epoch=1)
        await node.start_another()
    assert node.domains.done == [("start", uid(99))]


async def test_without_a_rebuild_a_vm_that_left_is_not_created_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await two_vms(node)
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.READY)
        await ask(client, "vm.delete", name="vm-1", grace_s=0)
        await eventually(lambda: is_gone(node, A))
    await node.put(record(1))
    async with node.agent():
        await node_says(node, NodeState.READY)
        await node.start_another()
        assert A not in node.domains.there


async def test_a_node_with_a_vm_in_conflict_keeps_holding(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await two_vms(node)
    await node.other_bus()
    other = record(9, name="vm-1", node="n2", spec_hash="x")
    await node.put(other)
    claim = subjects.name_claim("default", "vm-1")
    await node.bus.put(claim, encode(NameClaim(uid=other.uid)))
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        done = await rebuild(client)
        conflict = next(vm for vm in done.vms if vm.uid == A)
        assert conflict.step == "conflict"
        assert "the name vm-1 is taken" in conflict.message
        assert [(one.joined, one.message) for one in done.nodes] == [
            (False, "holds its VMs: it has a VM in conflict"),
            (False, "is silent"),  # n2, which has the other VM
        ]
        await node_says(node, NodeState.RECOVERING)
    assert node.domains.done == []


async def test_unsigned_records_wait_for_a_person(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await two_vms(node)
    await node.other_bus()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        done = await rebuild(client, accept_unsigned=[])
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "unsigned"), (B, "unsigned")]
        assert f"--accept-unsigned {NODE}/{A}" in done.vms[0].message
        # it would end a guest that it may not have
        assert [one.joined for one in done.nodes] == [False]
        assert await on_bus(node, A) is None
        done = await rebuild(client, accept_unsigned=[f"{NODE}/{A}"])
        assert [(vm.uid, vm.step) for vm in done.vms] == [(A, "add"), (B, "unsigned")]
        done = await rebuild(client, accept_unsigned=[f"{NODE}/{B}"])
        assert [(vm.uid, vm.step) for vm in done.vms] == [(B, "add")]
        await node_says(node, NodeState.READY)


async def test_signed_records_need_no_person_once_the_key_is_back(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.READY)
        made = (await ask(client, "vm.create", name="web", image="tiny"))["vm"]["uid"]

        async def running() -> bool:
            return await states(node, made) == ["Running"]

        await eventually(running)
        copy = await backup.take(client)
    key = {name: value for name, value in copy.values.items() if "_signing" in name}
    await node.other_bus()
    for name, value in key.items():
        await node.bus.put(name, value)
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.RECOVERING)
        done = await rebuild(client, accept_unsigned=[])
        assert [(vm.uid, vm.step) for vm in done.vms] == [(made, "add")]
        assert await states(node, made) == ["Running"]
