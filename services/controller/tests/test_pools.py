"""Pools of nodes: followed, and asked before a volume, its growth or its VM is accepted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, node, status, uid
from services.controller.tests.test_departures import Site, site
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_holders import _known, make, shown, using, vm
from services.controller.tests.virtual import World, settle

from virtbus.controller.core.pools import KnownPools
from virtbus.schemas import subjects
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.operation import OperationPhase, OperationStatus
from virtbus.schemas.pool import NodePools, PoolKind, PoolReport, PoolState
from virtbus.schemas.states import VmState
from virtbus.schemas.wire import encode, validate


def pool(name: str = "fast", **more: object) -> PoolReport:
    plain = {"name": name, "kind": PoolKind.LOCAL, "state": PoolState.READY} | more
    return PoolReport.model_validate(plain)


async def tell(made: World, name: str, *pools: PoolReport) -> None:
    value = encode(NodePools(node=name, pools=pools))
    await made.host.put(subjects.node_pools(name), value)
    await settle()


async def two_nodes(made: World) -> None:
    await made.hear(node("n1"))
    await made.hear(node("n2"))
    await tell(made, "n2", pool(size_bytes=10 * GIB, free_bytes=5 * GIB, overcommit=2.0))


FAST = {"size": "1GiB", "pool": "fast"}


@played()
async def test_nodes_show_their_pools_until_they_are_forgotten(made: World) -> None:
    async def pools() -> dict[str, list[str]]:
        page = validate(NodePage, await made.ask("list", resource="node"))
        return {one.node: [pool.name for pool in one.pools] for one in page.items}

    await two_nodes(made)
    await made.host.put(subjects.node_pools("n1"), b"\xc1garbage")
    await settle()
    assert await pools() == {"n1": [], "n2": ["fast"]}
    await made.host.purge(subjects.node_pools("n2"), marker_ttl_s=60)
    await settle()
    assert await pools() == {"n1": [], "n2": []}


@played()
async def test_a_volume_draws_its_vm_to_a_node_with_its_pool(made: World) -> None:
    await two_nodes(made)
    await make(made, spec=FAST)
    one = await vm(made, 1, "data")
    assert (one.node, one.volume_refs["disk-data"].pool) == ("n2", "fast")
    assert (await shown(made)).node == "n2"


@played()
async def test_a_pool_that_nobody_has_is_refused_with_the_pools_there_are(made: World) -> None:
    await two_nodes(made)
    error = await refused(make(made, spec={"size": "1GiB", "pool": "slow"}))
    assert (error.code, error.reason, "are: fast;" in str(error)) == (422, "pool_unknown", True)
    error = await refused(make(made, spec=FAST, node="n1"))
    assert (error.reason, "n1 has no pool fast" in str(error)) == ("pool_unknown", True)
    await make(made)  # the pool local needs no report


@played()
async def test_a_vm_waits_with_the_reason_of_each_pool(made: World) -> None:
    await two_nodes(made)
    await make(made, spec=FAST)
    await tell(made, "n2", pool(state=PoolState.GONE, message="nothing is mounted"))
    waiting = await vm(made, 1, "data")
    view = await made.vm("get", uid=uid(1))
    assert waiting.node == UNPLACED
    for why in ("n1 has no pool fast", "n2 has a pool fast that is Gone: nothing is mounted"):
        assert why in str(view.model_dump())
    await two_nodes(made)
    await asyncio.sleep(10)
    await settle()
    view = await made.vm("get", uid=uid(1))
    assert view.node == "n2"


@played()
async def test_a_pool_refuses_what_exceeds_its_limit_before_anything_is_written(
    made: World,
) -> None:
    await two_nodes(made)
    error = await refused(make(made, spec={"size": "21GiB", "pool": "fast"}))
    assert (error.code, error.reason, "overcommit" in str(error)) == (429, "pool_full", True)
    await make(made, spec=FAST, uid=uid(7))
    await vm(made, 1, "data")
    error = await refused(made.ask("update", "volume", name="data", size="22GiB"))
    assert error.reason == "pool_full"
    assert (await shown(made)).spec.size == GIB
    await tell(made, "n2", pool(state=PoolState.FULL, message="0B are free"))
    error = await refused(made.ask("update", "volume", name="data", size="2GiB"))
    assert "is Full: 0B are free" in str(error)
    assert (await refused(make(made, "more", spec=FAST))).reason == "pool_full"
    await make(made, spec=FAST, uid=uid(7))  # a repeat of a create is not refused


@played()
async def test_a_copy_of_an_image_goes_to_a_node_with_the_pool(made: World) -> None:
    await two_nodes(made)
    view = await make(made, spec={"size": 0, "pool": "fast", "source": {"image": "tiny"}})
    assert (view.node, view.state) == ("n2", "Filling")


@played()
async def test_a_volume_of_another_pool_has_snapshots_while_its_vm_is_off(made: World) -> None:
    await two_nodes(made)
    await make(made, spec=FAST)
    one = await vm(made, 1, "data")
    both: tuple[dict[str, Any], ...] = ({"vm": "vm1"}, {"volume": "data"})
    for state, more in ((VmState.RUNNING, {}), (VmState.STOPPED, {"layered": True})):
        await made.say(status(one, state))
        await settle()
        for of in both:
            error = await refused(made.ask("create", "snapshot", name="s", **of, **more))
            assert (error.code, error.reason) == (422, "no_snapshots")
            assert "stop its VM" in error.body.message
    for number, of in enumerate(both):
        await made.ask("create", "snapshot", name=f"s-{number}", **of)
    assert (await made.ask("create", "backup", vm="vm1", id=uid(90)))["kind"] == "backup"


@played()
async def test_a_volume_that_its_place_cannot_hold_is_refused(made: World) -> None:
    await two_nodes(made)
    await tell(made, "n2", san("default.data", "default.more", place_bytes={"default.data": GIB}))
    error = await refused(make(made, spec={"size": "2GiB", "pool": "san"}))
    assert (error.code, error.reason) == (400, "disk_too_large")
    assert "the place of default.data in the pool san has 1GiB" in error.body.message
    await make(made, spec=SAN)
    await make(made, "more", spec={"size": "2GiB", "pool": "san"})  # nobody knows its place


@played()
async def test_a_volume_on_a_device_has_exports_and_copies_only(made: World) -> None:
    await two_nodes(made)
    raw = pool("raw", kind=PoolKind.BLOCK, assigned=("default.data",))
    await tell(made, "n2", raw, pool())
    view = await make(made, spec={"size": "1GiB", "pool": "raw"}, uid=uid(7))
    done = OperationStatus(
        id=view.fill_operation, node="n2", phase=OperationPhase.SUCCEEDED, ended_ns=1
    )
    await made.host.put(subjects.operation_status("n2", done.id), encode(done))
    await asyncio.sleep(70)
    assert (await shown(made)).state == "Bound"
    for resource, asked in (("snapshot", {"volume": "data", "name": "s"}),):
        error = await refused(made.ask("create", resource, **asked))
        assert (error.reason, "--from-volume data" in str(error)) == ("no_snapshots", True)
    assert (await made.ask("export", "operation", volume="data", id=uid(90)))["node"] == "n2"
    await make(made, "copy", spec={"size": 0, "source": {"volume": "data"}})


@played()
async def test_a_volume_without_data_is_not_refused_by_a_full_pool_that_it_does_not_use(
    made: World,
) -> None:
    await two_nodes(made)
    await tell(made, "n1", pool("local", state=PoolState.FULL, message="0B are free"))
    await make(made, "other")
    assert (await vm(made, 1, "other")).node == "n2"


GROUP = {"size": "1GiB", "pool": "group"}


def group(**more: object) -> PoolReport:
    room = {"size_bytes": 10 * GIB, "free_bytes": 10 * GIB, "overcommit": 1.0}
    return pool("group", kind=PoolKind.LVM, **room, **more)


@played()
async def test_a_volume_in_a_volume_group_is_prepared_and_grows_and_is_no_snapshot(
    made: World,
) -> None:
    await two_nodes(made)
    await tell(made, "n2", group(), pool())
    view = await make(made, spec=GROUP, uid=uid(7))
    assert (view.node, view.state) == ("n2", "Filling")
    done = OperationStatus(
        id=view.fill_operation, node="n2", phase=OperationPhase.SUCCEEDED, ended_ns=1
    )
    await made.host.put(subjects.operation_status("n2", done.id), encode(done))
    await asyncio.sleep(70)
    assert (await shown(made)).state == "Bound"
    await made.ask("update", "volume", name="data", size="2GiB")
    error = await refused(made.ask("update", "volume", name="data", size="22GiB"))
    assert (error.reason, "overcommit" in str(error)) == ("pool_full", True)
    ref = (await vm(made, 1, "data")).volume_refs["disk-data"]
    assert (ref.kind, ref.size_bytes, ref.copied) == (PoolKind.LVM, 2 * GIB, True)
    error = await refused(made.ask("create", "snapshot", volume="data", name="s"))
    assert error.reason == "no_snapshots"


@played()
async def test_a_volume_group_and_a_directory_of_one_name_are_not_mixed(made: World) -> None:
    await two_nodes(made)
    await tell(made, "n1", group())
    await tell(made, "n2", pool("group"))
    for node_ in ("", "n1", "n2"):
        error = await refused(make(made, spec=GROUP, **({"node": node_} if node_ else {})))
        assert (error.reason, "another name" in str(error)) == ("pool_kinds_differ", True)


def san(*volumes: str, **more: object) -> PoolReport:
    return pool("san", kind=PoolKind.NBD, assigned=volumes, **more)


SAN = {"size": "1GiB", "pool": "san"}


@played()
async def test_a_volume_on_a_server_follows_its_vms_from_node_to_node(made: World) -> None:
    await two_nodes(made)
    await tell(made, "n1", san("default.data"))
    await make(made, spec=SAN)
    first = await vm(made, 1, "data")
    await tell(made, "n2", san("default.data", "default.more"))
    await make(made, "more", spec=SAN)
    assert first.volume_refs["disk-data"].kind is PoolKind.NBD
    assert (await shown(made)).node == "n1"
    assert (await refused(vm(made, 2, "data"))).reason == "volume_in_use"
    await made.ask("delete", uid=uid(1), grace_s=0)
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.DELETING, released=True))
    await asyncio.sleep(5)
    await settle()
    free = await shown(made)
    assert (free.node, free.state) == ("", "Available")
    assert (await vm(made, 3, "data", "more")).node == "n2"  # n1 has nothing for `more`


@played()
async def test_what_the_operator_of_a_server_decides_is_refused(made: World) -> None:
    await two_nodes(made)
    await tell(made, "n1", san("default.data", "default.copy"))
    error = await refused(make(made, "other", spec=SAN))
    assert (error.code, error.reason) == (422, "pool_unassigned")
    image = SAN | {"source": {"image": "tiny"}}
    assert (await refused(make(made, "copy", spec=image))).reason == "no_copies"
    await make(made, spec=SAN)
    error = await refused(made.ask("update", "volume", name="data", size="2GiB"))
    assert (error.code, error.reason) == (422, "cannot_grow")
    await vm(made, 1, "data")
    for verb, resource, asked in (
        ("create", "volume", {"name": "c", "spec": {"size": 0, "source": {"volume": "data"}}}),
        ("export", "operation", {"volume": "data"}),
    ):
        assert (await refused(made.ask(verb, resource, **asked))).reason == "no_copies"


@played()
async def test_a_deleted_volume_on_a_server_is_gone_at_once_and_its_data_stays(
    made: World,
) -> None:
    await two_nodes(made)
    await tell(made, "n1", san("default.data"))
    await make(made, spec=SAN)
    await made.ask("delete", "volume", name="data")  # no node is asked
    assert (await refused(shown(made))).reason == "volume_not_found"


@played()
async def test_a_vm_whose_node_lacks_the_server_gets_no_volume_of_it(made: World) -> None:
    await two_nodes(made)
    await tell(made, "n2", san("default.data"))
    await make(made, spec=SAN)
    assert (await vm(made, 1)).node == "n1"
    error = await refused(made.ask("attach", "volume", name="data", vm="vm1"))
    assert (error.reason, "n1 has no pool san" in str(error)) == ("volume_elsewhere", True)


async def reach(there: Site, *names: str) -> None:
    """Let only these nodes reach the server."""
    for name in ("n1", "n2", "n3"):
        reports = (san("default.data"),) if name in names else ()
        await tell(there.made, name, *reports)


@asynccontextmanager
async def three_hosts(there: Site) -> AsyncIterator[None]:
    """n1 runs a VM with a volume on a server; then n2 and n3 join, which has most room."""
    async with there.host("n1").on():
        await there.until(lambda: _known(there, "n1"))
        await reach(there, "n1")
        await make(there.made, spec=SAN)
        await there.vm(1, "n1", **using("data"), eviction_strategy="None")
        async with there.host("n2").on(), there.host("n3", 64 * GIB).on():
            await there.until(lambda: _known(there, "n3"))
            yield


async def held_on(there: Site, name: str) -> None:
    view = await shown(there.made)
    assert (view.holder, view.node) == (uid(1), name)


@site()
async def test_a_volume_on_a_server_goes_with_its_vm_to_a_node_that_reaches_it(
    there: Site,
) -> None:
    async with three_hosts(there):
        error = await refused(there.made.vm("move", uid=uid(1), to="n2"))
        assert (error.reason, "n2 has no pool san" in str(error)) == ("no_capacity", True)
        await reach(there, "n1", "n2")
        await there.made.vm("move", uid=uid(1))
        await there.runs_on(1, "n2")
        await held_on(there, "n2")
        await reach(there, "n2", "n3")
        await there.node("drain", "n2")
        await there.runs_on(1, "n3")
        await held_on(there, "n3")


@site()
async def test_a_vm_whose_server_no_other_node_reaches_stays_in_a_drain(there: Site) -> None:
    async with three_hosts(there):
        await there.node("drain", "n1")
        await asyncio.sleep(30)
        assert (await there.record(1)).node == "n1"
        assert there.guests.running[uid(1)] == "n1"
        await held_on(there, "n1")


@site()
async def test_a_fence_moves_a_vm_with_the_volume_on_its_server(there: Site) -> None:
    async with there.host("n2").on():
        await there.until(lambda: _known(there, "n2"))
        async with there.host("n1", 64 * GIB).on():
            await there.until(lambda: _known(there, "n1"))
            await reach(there, "n1")
            await make(there.made, spec=SAN)
            await there.vm(1, "n1", **using("data"), eviction_strategy="None")
        await asyncio.sleep(60)
        await there.node("fence", "n1", confirm="off")
        await asyncio.sleep(30)
        assert (await there.record(1)).node == "n1"
        await reach(there, "n2")
        await there.runs_on(1, "n2")
        await held_on(there, "n2")


@played()
async def test_a_volume_on_a_device_is_prepared_on_its_node_also_without_a_source(
    made: World,
) -> None:
    await two_nodes(made)
    await tell(made, "n2", pool("raw", kind=PoolKind.BLOCK, assigned=("default.data",)))
    raw = {"size": "1GiB", "pool": "raw"}
    assert (await refused(make(made, "other", spec=raw))).reason == "pool_unassigned"
    view = await make(made, spec=raw, uid=uid(7))
    assert (view.state, view.node) == ("Filling", "n2")
    again = await make(made, spec=raw, uid=uid(7))
    assert (again.uid, again.fill_operation) == (view.uid, view.fill_operation)
    one = await vm(made, 1, "data")
    assert (one.node, one.volume_refs["disk-data"].copied) == ("n2", True)
    assert (await refused(made.ask("update", "volume", name="data", size="2GiB"))).code == 422


def test_a_node_reports_only_its_own_pools() -> None:
    known = KnownPools()
    with pytest.raises(VirtbusError):
        known.put(subjects.node_pools("n1"), encode(NodePools(node="n2", pools=(pool(),))))
    assert known.put(subjects.node_pools("n2"), encode(NodePools(node="n2", pools=(pool(),))))
    assert (known.with_pool("fast"), known.names()) == (["n2"], ["fast"])
