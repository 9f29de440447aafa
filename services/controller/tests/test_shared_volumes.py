"""Several VMs hold a shared volume at once, and each rule about a holder holds for each of them."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, record, status, uid
from services.controller.tests.schedules import broken_everywhere
from services.controller.tests.test_departures import Site, site
from services.controller.tests.test_hold_sweep import agent
from services.controller.tests.test_hot_volumes import told
from services.controller.tests.test_living_volumes import hosts, restore, value
from services.controller.tests.test_pools import SAN, reach, san, tell, two_nodes
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_attachments import attach, detach, off, stored
from services.controller.tests.test_volume_holders import (
    DATA,
    _known,
    at,
    holder,
    make,
    prepared,
    shown,
    using,
    vm,
)
from services.controller.tests.test_volume_orphans import holding
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Bus
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.core.volume_holds import freed, held, ref_of
from virtbus.controller.core.volumes import Volumes
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node_rpc import HeldVolume
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.records import read_volume
from virtbus.schemas.states import VmState
from virtbus.schemas.volume import VolumeHold, VolumeRecord, VolumeSpec
from virtbus.schemas.volume_spec import SHARED_MAX, Access
from virtbus.schemas.wire import encode

SHARED = {"size": "1GiB", "access": "shared"}
SPEC = VolumeSpec(size=GIB, access=Access.SHARED)


def of_template(**more: Any) -> dict[str, Any]:
    named = {"name": "data", "template": SHARED | more}
    return {"volumes": [{"name": "disk-data", "volume": named}]}


async def delete(made: World, number: int) -> None:
    """Delete a VM, whose node then has released it."""
    await made.ask("delete", uid=uid(number), grace_s=0)
    await made.say(status(await stored(made, number), VmState.DELETING, released=True))
    await asyncio.sleep(5)
    await settle()


async def names(made: World) -> list[str]:
    return [one.name for one in (await shown(made)).holders]


# --- holds -----------------------------------------------------------------------------------
@played()
async def test_two_vms_hold_one_shared_volume_and_the_end_of_one_keeps_the_other(
    made: World,
) -> None:
    await make(made, spec=SHARED)
    assert (await shown(made)).spec.access is Access.SHARED
    first, second = await vm(made, 1, "data"), await vm(made, 2, "data")
    assert first.volume_refs == second.volume_refs
    assert first.volume_refs["disk-data"].shared
    view = await shown(made)
    assert (view.state, view.holder, view.holder_name) == ("InUse", uid(1), "vm1")
    assert [(one.name, one.node) for one in view.holders] == [("vm1", "n1"), ("vm2", "n1")]
    error = await refused(made.ask("delete", "volume", name="data"))
    assert error.reason == "volume_in_use"
    assert all(uid(number) in str(error) for number in (1, 2))
    await delete(made, 1)
    view = await shown(made)
    assert (view.state, view.holder, await names(made)) == ("InUse", uid(2), ["vm2"])
    assert (await refused(made.ask("delete", "volume", name="data"))).reason == "volume_in_use"
    await delete(made, 2)
    view = await shown(made)
    assert (view.state, view.node, view.holders) == ("Bound", "n1", ())


@played()
async def test_a_volume_has_a_bounded_number_of_holders(made: World) -> None:
    await make(made, spec=SHARED)
    full = (await at(made.host)).model_copy(
        update={
            "holder": uid(100),
            "holds": {uid(100 + n): VolumeHold(since_ns=1, node="n1") for n in range(SHARED_MAX)},
        }
    )
    await made.host.put(DATA, encode(full))
    await settle()
    error = await refused(vm(made, 1, "data"))
    assert (error.code, error.reason) == (409, "too_many_holders")
    assert await made.stored(uid(1)) is None
    assert len((await at(made.host)).holders) == SHARED_MAX


def test_a_volume_of_one_vm_is_stored_as_before() -> None:
    one = volume(9, holder=uid(1), held_since_ns=7)
    assert b"access" not in encode(one) + encode(ref_of(one))
    assert b"holds" not in encode(one)
    assert b"shared" not in encode(ref_of(one))
    assert (one.holders, volume(9).holders) == ((uid(1),), ())
    assert read_volume(DATA, encode(one)) == one


@played()
async def test_a_volume_of_one_vm_still_refuses_the_second(made: World) -> None:
    await make(made)
    await vm(made, 1, "data")
    assert [one.name for one in (await shown(made)).holders] == ["vm1"]
    assert (await refused(vm(made, 2, "data"))).reason == "volume_in_use"
    error = await refused(made.ask("create", "volume", name="data", spec=SHARED))
    assert (error.reason, (await at(made.host)).spec.access) == ("name_taken", Access.ONE)


@played(nodes=3)
async def test_the_second_vm_follows_the_data_of_a_local_pool(made: World) -> None:
    await make(made, spec=SHARED, node="n2")
    assert [(await vm(made, n, "data")).node for n in (1, 2, 3)] == ["n2"] * 3
    error = await refused(made.vm("move", uid=uid(2), to="n1"))
    assert error.reason == "volumes_stay"


@played()
async def test_vms_on_two_nodes_hold_a_shared_volume_on_a_server(made: World) -> None:
    await two_nodes(made)
    await tell(made, "n1", san("default.data"))
    await make(made, spec=SAN | {"access": "shared"})
    assert (await vm(made, 1, "data")).node == "n1"
    await tell(made, "n1")
    await tell(made, "n2", san("default.data"))
    assert (await vm(made, 2, "data")).node == "n2"
    view = await shown(made)
    assert (view.node, [one.node for one in view.holders]) == ("", ["n1", "n2"])
    await delete(made, 2)
    await delete(made, 1)
    assert ((await shown(made)).state, (await at(made.host)).bound) == ("Available", False)


@site()
async def test_each_vm_of_a_volume_on_a_server_moves_alone(there: Site) -> None:
    async def nodes() -> dict[str, str]:
        return {one.name: one.node for one in (await shown(there.made)).holders}

    async with there.host("n1").on():
        await there.until(lambda: _known(there, "n1"))
        await reach(there, "n1", "n2")
        await make(there.made, spec=SAN | {"access": "shared"})
        for number in (1, 2):
            await there.vm(number, "n1", **using("data"), eviction_strategy="None")
        before = await nodes()
        assert set(before.values()) == {"n1"}
        first, second = before
        async with there.host("n2").on():
            await there.until(lambda: _known(there, "n2"))
            await there.made.vm("move", uid=uid(2), to="n2")
            await there.runs_on(2, "n2")
            assert await nodes() == {first: "n1", second: "n2"}
            await there.node("drain", "n1")
            await there.runs_on(1, "n2")
            assert await nodes() == {first: "n2", second: "n2"}


def test_a_vm_that_goes_to_another_node_takes_only_its_own_hold_along() -> None:
    there = volume(9, spec=SPEC, pool_kind=PoolKind.NBD)
    for number, node in ((1, "n1"), (2, "n2"), (1, UNPLACED), (1, "n3")):
        one = holder(number, there, node)
        there = held(StoredVolume(there, 1), ref_of(there), one, number)
    assert {vm: hold.node for vm, hold in there.holds.items()} == {uid(1): "n3", uid(2): "n2"}
    assert (there.node, there.bound, there.holds[uid(1)].since_ns) == ("", True, 1)
    left = freed(StoredVolume(there, 1), ref_of(there), uid(1))
    assert left is not None
    assert (left.holders, left.holder, left.held_since_ns, left.bound) == (
        *((uid(2),), uid(2), 2, True),
    )
    assert freed(StoredVolume(left, 1), ref_of(there), uid(1)) is None


# --- attach and detach -----------------------------------------------------------------------
@played()
async def test_a_detach_names_its_vm_while_several_hold_the_volume(made: World) -> None:
    await make(made, spec=SHARED)
    for number in (1, 2):
        await off(made, number)
        await attach(made, to=f"vm{number}")
        await made.say(status(await stored(made, number), VmState.STOPPED))
        await settle()
    error = await refused(detach(made))
    assert (error.code, error.reason) == (409, "several_holders")
    assert "VMs vm1, vm2 hold" in error.body.message
    assert (await refused(detach(made, vm="nobody"))).code == 404
    await off(made, 3)
    assert len((await detach(made, vm="vm3")).holders) == 2, "vm3 does not hold it"
    for _ in range(2):  # the second is a repeat
        await detach(made, vm="vm1")
        assert await names(made) == ["vm2"]
    assert (await stored(made, 1)).volume_refs == {}
    assert (await detach(made)).state == "Bound"


@played()
async def test_a_guest_that_keeps_the_disk_delays_its_own_detach_only(made: World) -> None:
    await make(made, spec=SHARED)
    for number in (1, 2):
        await vm(made, number, "data")
        await told(made, number)
    view = await detach(made, vm="vm2")
    assert [one.detaching for one in view.holders] == [False, True]
    assert (view.state, set((await stored(made, 2)).detaching)) == ("Detaching", {"disk-data"})
    await attach(made, to=(await vm(made, 3)).name)
    assert await names(made) == ["vm1", "vm2", "vm3"]
    await told(made, 2, detached=("disk-data",))
    assert await names(made) == ["vm1", "vm3"]
    assert (await shown(made)).state == "InUse"


@played()
async def test_disks_that_buffer_writes_on_the_host_are_refused_with_the_field(
    made: World,
) -> None:
    await make(made, spec=SHARED)

    def spec(cache: str) -> dict[str, Any]:
        disks = [{"name": "disk-data", "cache": cache}]
        return {**using("data"), "domain": {"devices": {"disks": disks}}}

    for cache in ("writeback", "writethrough", "unsafe"):
        error = await refused(vm(made, 1, "data", spec=spec(cache)))
        assert error.code == 400
        assert error.body.details[0].path.endswith(".cache")
    for number, cache in enumerate(("none", "directsync"), 1):
        await vm(made, number, "data", spec=spec(cache))
    view = await made.vm("get", uid=uid(1))
    plain = view.spec.model_dump(mode="json")
    (disk,) = (one for one in plain["domain"]["devices"]["disks"] if one["name"] == "disk-data")
    disk["cache"] = "writeback"
    error = await refused(made.vm("update", uid=uid(1), revision=view.revision, spec=plain))
    assert (error.code, error.body.details[0].path[-6:]) == (400, ".cache")


# --- refusals --------------------------------------------------------------------------------
@played()
async def test_what_needs_one_writer_is_refused(made: World) -> None:
    for more in ({"source": {"image": "tiny"}}, {"retention": "Delete"}):
        assert (await refused(make(made, spec=SHARED | more))).code == 400
    await make(made, spec=SHARED)
    await off(made, 1, "data")
    copy = {"name": "c", "spec": {"size": 0, "source": {"volume": "data"}}}
    disk = {"name": "c", "spec": {"size": 0, "source": {"vm": "vm1", "disk": "disk-data"}}}
    for code, reason, verb, resource, asked in (
        (422, "cannot_grow", "update", "volume", {"name": "data", "size": "2GiB"}),
        (400, "invalid", "update", "volume", {"name": "data", "retention": "Delete"}),
        (422, "volume_shared", "move", "volume", {"name": "data", "node": "n1", "pool": "x"}),
        (422, "no_copies", "create", "volume", copy),
        (422, "no_copies", "create", "volume", disk),
        (422, "no_copies", "export", "operation", {"volume": "data"}),
        (422, "no_copies", "export", "operation", {"vm": "vm1", "disk": "disk-data"}),
        (422, "no_copies", "flatten", "operation", {"volume": "data"}),
        (422, "no_snapshots", "create", "snapshot", {"name": "s", "volume": "data"}),
        (422, "no_snapshots", "create", "snapshot", {"name": "s", "vm": "vm1"}),
        (422, "no_snapshots", "create", "backup", {"vm": "vm1"}),
    ):
        error = await refused(made.ask(verb, resource, **asked))
        assert (error.code, error.reason) == (code, reason), (verb, asked, str(error))
    await made.ask("update", "volume", name="data", protected=True, labels={"a": "b"})


@played()
async def test_templates_of_two_vms_make_one_shared_volume_which_stays(made: World) -> None:
    for number in (1, 2):
        await vm(made, number, spec=of_template())
    assert await names(made) == ["vm1", "vm2"]
    error = await refused(vm(made, 3, spec=of_template(access="one")))
    assert (error.code, error.reason) == (409, "access_differs")
    assert (await refused(vm(made, 3, spec=of_template(retention="Delete")))).code == 400
    await delete(made, 1)
    await delete(made, 2)
    assert (await shown(made)).state == "Bound"


# --- what the bus has lost ---------------------------------------------------------------------
async def test_a_rebuild_restores_each_holder_of_a_shared_volume() -> None:
    bus = MemoryBus(MemoryServer())
    for number in (1, 2):
        one, commits = holder(number, volume(9, spec=SPEC)), Commits(bus)
        await VolumeWrites(bus).restore(one)
        await commits.write_back(one, await commits.known(one.uid))
    there = await at(bus)
    assert (there.spec.access, there.holders) == (Access.SHARED, (uid(1), uid(2)))
    assert (there.node, there.bound) == ("n1", True)


@played()
async def test_an_adopted_shared_volume_has_all_of_its_vms(made: World) -> None:
    await make(made, spec=SHARED)
    for number in (1, 2):
        await vm(made, number, "data")
    ref = ref_of(await at(made.host))
    await made.host.purge(DATA)
    await settle()
    async with holding(made, HeldVolume(folder=ref.folder, ref=ref)):
        await made.ask("adopt", "volume", name="data", node="n1")
    assert (await shown(made)).spec.access is Access.SHARED
    assert await names(made) == ["vm1", "vm2"]


@played()
async def test_a_holder_that_a_restored_bus_lacks_keeps_no_other_out(made: World) -> None:
    await two_nodes(made)
    for node in ("n1", "n2"):
        await tell(made, node, san("default.data"))
    await make(made, spec=SAN | {"access": "shared"})
    yesterday = await value(made)
    one = await vm(made, 1, "data")
    await restore(made, DATA, yesterday)
    async with hosts(made, one):
        await vm(made, 2, "data")
    assert await names(made) == ["vm2"]


@played(nodes=2)
async def test_the_hold_of_each_vm_without_a_record_ends_by_the_word_of_its_node(
    made: World,
) -> None:
    holds = {
        uid(1): VolumeHold(since_ns=7, node="n2"),
        uid(2): VolumeHold(since_ns=8, node="n1"),
        uid(3): VolumeHold(since_ns=9),
    }
    kept = volume(9, spec=SPEC, pool_kind=PoolKind.NBD, bound=True, holder=uid(1), holds=holds)
    await made.host.put(DATA, encode(kept))
    async with agent(made, {uid(1): 1, uid(2): 1}):  # n1, which knows nothing of n2
        await asyncio.sleep(150)
    assert (await at(made.host)).holders == (uid(1),)
    assert f"VM {uid(1)} holds it and has no record" in (await shown(made)).message
    view = await detach(made, gone=uid(1))
    assert (view.state, view.holders) == ("Available", ())


@played(nodes=2)
async def test_a_forgotten_node_loses_the_data_of_its_pool_and_none_of_a_server(
    made: World,
) -> None:
    hold = {uid(1): VolumeHold(since_ns=7, node="n1")}
    local = volume(8, spec=SPEC, node="n1", bound=True, holder=uid(1), holds=hold)
    server = local.model_copy(update={"node": "", "pool_kind": PoolKind.NBD})
    await made.host.put(DATA, encode(local))
    await asyncio.sleep(60)
    assert (await refused(made.ask("forget", "node", node="n1"))).reason == "node_has_volumes"
    await made.host.put(DATA, encode(server))
    await settle()
    assert not (await made.ask("forget", "node", node="n1")).get("lost_volumes")
    there = await at(made.host)
    assert (there.lost, there.bound, there.holds.get(uid(1), VolumeHold(since_ns=7)).node) == (
        *(False, False, ""),
    )


def test_the_cache_names_each_holder_without_a_record() -> None:
    known = Volumes()
    holds = {uid(n): VolumeHold(since_ns=n) for n in (1, 2)}
    known.apply(StoredVolume(volume(9, spec=SPEC, holder=uid(1), holds=holds), 1))
    assert [vm for vm, _ in known.held_outside({uid(1)})] == [uid(2)]
    assert [vm for vm, _ in known.held_outside(())] == [uid(1), uid(2)]


async def test_two_controllers_add_two_holders_and_lose_none() -> None:
    bus = MemoryBus(await prepared())
    shared = (await at(bus)).model_copy(update={"spec": SPEC})
    await bus.put(DATA, encode(shared))
    async with asyncio.TaskGroup() as group:
        for number in range(1, 9):
            one = holder(number, shared)
            group.create_task(Commits(bus).create(one, None))
    assert sorted((await at(bus)).holders) == [uid(number) for number in range(1, 9)]


async def test_a_second_holder_may_crash_at_every_call_and_the_first_keeps_its_hold() -> None:
    shared = volume(9, spec=SPEC)

    async def there() -> MemoryServer:
        server = MemoryServer()
        await MemoryBus(server).put(DATA, encode(shared), expect=0)
        await Commits(MemoryBus(server)).create(holder(1, shared), None)
        return server

    def join(bus: Bus) -> Awaitable[object]:
        return Commits(bus).create(holder(2, shared), None)

    async for server in broken_everywhere(there, join):
        bus = MemoryBus(server)
        stands = await Commits(bus).latest(uid(2)) is not None
        assert (await at(bus)).holders == ((uid(1), uid(2)) if stands else (uid(1),))
        await join(bus)
        assert (await at(bus)).holders == (uid(1), uid(2))


@pytest.mark.parametrize("gone", [1, 2])
def test_a_record_that_no_vm_has_is_not_shared(gone: int) -> None:
    there: VolumeRecord = volume(9, spec=SPEC)
    for number in (1, 2):
        there = held(StoredVolume(there, 1), ref_of(there), holder(number, there), 5)
    left = freed(StoredVolume(there, 1), ref_of(there), record(gone).uid, ended=True)
    assert left is not None
    assert (left.deleting, left.holders, left.node) == (False, (uid(3 - gone),), "n1")
