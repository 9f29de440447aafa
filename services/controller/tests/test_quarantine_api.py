"""`node.quarantine`: the controller writes an adopted entry's record, or refuses with a reason."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from services.controller.tests.virtual import settle
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, record, uid
from tests.recovery.test_rebuild import ask, controller, on_bus

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.controller.core.unrecorded_vms import is_held
from virtbus.controller.edge import quarantine
from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.quarantine import NodeQuarantined, QuarantineRequest
from virtbus.schemas.records import DELETED, read_volume
from virtbus.schemas.vm import NameClaim
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import encode, read, validate

A = uid(1)
KEY = subjects.vm_record(NODE, A)
NAME = subjects.name_claim("default", "vm-1")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, resync_s=0.05)


async def call(client: MemoryBus, do: str = "list", **more: Any) -> NodeQuarantined:
    answer = await ask(client, "node.quarantine", node=NODE, do=do, **more)
    return validate(NodeQuarantined, answer)


async def refused(client: MemoryBus, **more: Any) -> str:
    with pytest.raises(VirtbusError) as caught:
        await call(client, "adopt", entry=A, **more)
    return caught.value.reason


async def known(client: MemoryBus) -> bool:
    return bool((await ask(client, "node.list"))["items"])


async def held(node: Node, client: MemoryBus, **more: Any) -> None:
    """A VM that runs and whose record the bus has lost, with its name."""
    await node.join()
    await eventually(lambda: known(client))
    await node.put(record(**more))
    await node.bus.put(NAME, encode(NameClaim(uid=A)))
    await eventually(lambda: node.domains.there.get(A) is not None)
    shelf = node.server.shelf(KEY)
    del shelf.entries[KEY]
    del shelf.entries[NAME]

    await eventually(lambda: listed(client))


async def listed(client: MemoryBus) -> bool:
    return any(one.held for one in (await call(client)).entries)


async def reported(node: Node) -> bool:
    """Return True once a status says that the node holds the VM."""
    entry = await node.bus.get(subjects.vm_status(NODE, A))
    return entry is not None and is_held(read(VmStatus, entry.value))


async def test_a_held_vm_is_adopted_as_it_runs_under_its_name(node: Node) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)
        done = await call(client, "adopt", entry=A)
        assert (done.adopted, done.entries) == (A, ())
        assert await on_bus(node, A) == record()
        claim = await node.bus.get(NAME)
        assert claim is not None
        assert claim.value == encode(NameClaim(uid=A))
        assert node.domains.there[A].state is DomainState.RUNNING
        assert node.domains.done == [("start", A)]


async def test_a_held_vm_is_adopted_with_its_volumes(node: Node) -> None:
    ref = VolumeRef(uid=uid(9), namespace="default", name="data", size_bytes=2**30)
    async with node.agent(), controller(node) as client:
        spec = {"volumes": [{"name": "data", "volume": {"name": "data"}}]}
        await held(node, client, volume_refs={"data": ref}, spec=spec)
        await call(client, "adopt", entry=A)
        entry = await node.bus.get(subjects.volume_record("default", "data"))
        assert entry is not None
        there = read_volume(entry.key, entry.value)
        assert (there.uid, there.holder, there.node) == (uid(9), A, NODE)


async def test_kept_disks_are_adopted_switched_off_and_start_on_request(node: Node) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)
        kept = await call(client, "keep", entry=A)
        assert [(one.entry, one.held) for one in kept.entries] == [(A, False)]
        await call(client, "adopt", entry=A)
        found = await on_bus(node, A)
        assert found is not None
        assert (found.epoch, found.powered) == (2, False)
        await ask(client, "vm.start", uid=A)
        await eventually(lambda: node.domains.done.count(("start", A)) == 2)


async def test_a_vm_that_is_elsewhere_by_now_keeps_its_uid_and_the_disks_become_another(
    node: Node,
) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)
        await call(client, "keep", entry=A)
        moved = record(node="n2", epoch=2)
        await node.put(moved)
        await node.bus.put(NAME, encode(NameClaim(uid=A)))
        assert await refused(client) == "vm_elsewhere"
        done = await call(client, "adopt", entry=A, name="rescued")
        assert done.adopted not in {None, A}
        copy = await on_bus(node, str(done.adopted))
        assert copy is not None
        assert (copy.name, copy.node, copy.powered) == ("rescued", NODE, False)
        assert await node.bus.get(subjects.vm_record("n2", A)) is not None


async def test_a_uid_that_was_deleted_does_not_come_back_but_its_disks_may(node: Node) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)
        await call(client, "keep", entry=A)
        await node.bus.purge(KEY, why=DELETED)
        assert await refused(client) == "deleted"
        assert (await call(client, "adopt", entry=A, name="rescued")).adopted not in {None, A}


async def test_a_name_that_is_taken_is_refused_before_anything_is_moved(node: Node) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)
        await call(client, "keep", entry=A)
        await node.put(record(2, name="vm-1"))
        await node.bus.put(NAME, encode(NameClaim(uid=uid(2))))
        assert await refused(client) == "name_taken"
        assert list(node.simulated.kept) == [A]
        await call(client, "adopt", entry=A, name="rescued")


async def test_a_held_vm_that_was_moved_meanwhile_is_ended_and_its_disks_stay(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was off for longer than a purge marker lasts."""
    monkeypatch.setattr(quarantine, "LOOK_S", 0.1)
    async with node.agent(), controller(node) as client:
        await held(node, client)
        await node.put(record(node="n2", epoch=2))
        await eventually(lambda: list(node.simulated.kept) == [A])
        assert node.domains.done == [("start", A), ("destroy", A)]


async def test_an_older_record_elsewhere_ends_nothing_that_is_held(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus was restored to a state from before the VM came here."""
    monkeypatch.setattr(quarantine, "LOOK_S", 0.05)
    async with node.agent(), controller(node) as client:
        await held(node, client, epoch=2)
        await node.put(record(node="n2", epoch=1))
        await asyncio.sleep(0.5)
        assert node.domains.done == [("start", A)]


async def test_a_create_of_a_vm_that_a_node_holds_is_refused(
    node: Node,
) -> None:
    """As the Kubernetes bridge does, which finds no VM for its VMI on a restored bus."""
    async with node.agent(), controller(node) as client:
        await held(node, client)
    async with node.agent(), controller(node) as client:  # which lists the current bus
        await eventually(lambda: known(client))
        await eventually(lambda: reported(node))
        await settle()
        with pytest.raises(VirtbusError) as caught:
            await ask(client, "vm.create", uid=A, name="vm-1", image="tiny")
        assert caught.value.reason == "held_on_node"
        assert f"virtbus node quarantine adopt {NODE} {A}" in str(caught.value)


async def test_a_held_vm_is_an_alarm(node: Node) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)

        async def alarmed() -> bool:
            alarms = (await ask(client, "node.list"))["alarms"]
            return any(f"{NODE} holds 1 VM(s)" in alarm for alarm in alarms)

        await eventually(alarmed)


async def test_only_the_entry_that_is_named_is_purged(node: Node) -> None:
    async with node.agent(), controller(node) as client:
        await held(node, client)
        node.simulated.kept[uid(7)] = QuarantineRequest(why="a test")
        await call(client, "keep", entry=A)
        left = await call(client, "purge", entry=A)
        assert [one.entry for one in left.entries] == [uid(7)]
        with pytest.raises(VirtbusError, match="entry"):
            await call(client, "purge")
