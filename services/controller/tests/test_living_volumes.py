"""A volume that a host has otherwise than a restored bus says is in no second guest."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from services.controller.tests.fleets import node, status, uid
from services.controller.tests.test_pools import SAN, san, tell, two_nodes
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.test_volume_holders import make, shown, vm
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.edge import volume_orphans
from virtbus.schemas import subjects
from virtbus.schemas.node_rpc import HeldResources, HeldVolume, Inspect, KnownRecords
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import encode, read, validate

DATA = subjects.volume_record("default", "data")


class Asked(list[str]):
    """The subjects of the requests that the hosts got."""


@asynccontextmanager
async def hosts(
    made: World,
    *known: VmRecord,
    data: Mapping[str, tuple[str, ...]] | None = None,
    unread: Mapping[str, str] | None = None,
) -> AsyncIterator[Asked]:
    """Two nodes with these records, and with the data of volumes by node and folder.

    `unread` is a pool by node that the node cannot read.
    """
    asked = Asked()

    def of_node(node: str) -> list[Endpoint]:
        async def records(_: Request) -> KnownRecords:
            asked.append(f"{node} records")
            return KnownRecords(node=node, records=tuple(one for one in known if one.node == node))

        async def inspect(request: Request) -> HeldResources:
            asked.append(f"{node} inspect")
            after = validate(Inspect, request.data).volumes_after or ""
            rest = [one for one in sorted((data or {}).get(node, ())) if one > after]
            gone = (unread or {}).get(node)
            return HeldResources(
                volumes=tuple(HeldVolume(folder=one) for one in rest[:1]),
                more=len(rest) > 1,
                unread_pools=(gone,) if gone else (),
            )

        return [
            Endpoint("records", subjects.rpc(node, "agent", "records"), records),
            Endpoint("inspect", subjects.rpc(node, "imaged", "inspect"), inspect),
        ]

    endpoints = [*of_node("n1"), *of_node("n2")]
    info = ServiceInfo("hosts", "1.0.0", "a test", {})
    async with MemoryBus(made.server, "own").serve(info, endpoints):
        yield asked


async def restore(made: World, key: str, value: bytes | None) -> None:
    """Restore a key to a value of an older backup, and let the controller list the bus again."""
    if value is None:
        await made.host.purge(key)
    else:
        await made.host.put(key, value)
    await asyncio.sleep(1.0)
    made.controllers["c1"]._fleet.quiet_since_s = asyncio.get_running_loop().time()


async def value(made: World, key: str = DATA) -> bytes:
    entry = await made.host.get(key)
    assert entry is not None
    return entry.value


async def on_server(made: World) -> None:
    """A volume on a server that two nodes reach."""
    await two_nodes(made)
    for each in ("n1", "n2"):
        await tell(made, each, san("default.data"))
    await make(made, spec=SAN)


@played()
async def test_a_volume_that_a_lost_vm_has_on_its_host_is_held_by_no_other(made: World) -> None:
    await on_server(made)
    yesterday = await value(made)
    one = await vm(made, 1, "data")
    await restore(made, DATA, yesterday)
    await restore(made, subjects.vm_record(one.node, one.uid), None)
    async with hosts(made, one):
        error = await refused(vm(made, 2, "data"))
        assert (error.code, error.reason) == (409, "held_on_node")
        assert all(text in str(error) for text in (one.node, one.uid, "virtbus bus rebuild"))
        assert (await shown(made)).holder == ""
        await vm(made, 3)
        attach = made.ask("attach", "volume", name="data", vm="vm3")
        assert (await refused(attach)).reason == "held_on_node"
        assert await made.stored(uid(2)) is None


@played()
async def test_the_answer_of_a_node_counts_until_the_node_is_forgotten(made: World) -> None:
    await on_server(made)
    yesterday = await value(made)
    one = await vm(made, 1, "data")
    await restore(made, DATA, yesterday)
    await restore(made, subjects.vm_record(one.node, one.uid), None)
    async with hosts(made, one):
        assert (await refused(vm(made, 2, "data"))).reason == "held_on_node"
        await asyncio.sleep(60)  # both are silent
        other = {"n1": "n2", "n2": "n1"}[one.node]
        await made.hear(node(other))
        await tell(made, other, san("default.data"))
        await made.ask("forget", "node", node=one.node)
        assert (await vm(made, 2, "data")).node == other


@played()
async def test_an_attach_that_the_bus_has_lost_counts_by_the_newer_record(made: World) -> None:
    await on_server(made)
    bare = await vm(made, 1)
    yesterday, before = await value(made), await value(made, subjects.vm_record(bare.node, uid(1)))
    await made.ask("stop", uid=uid(1))
    stopped = await made.stored(uid(1))
    assert stopped is not None
    await made.say(status(stopped, VmState.STOPPED))
    await settle()
    await made.ask("attach", "volume", name="data", vm="vm1")
    newer = await made.stored(uid(1))
    assert newer is not None
    assert newer.volume_refs
    await restore(made, DATA, yesterday)
    await restore(made, subjects.vm_record(bare.node, uid(1)), before)
    async with hosts(made, newer):
        assert (await refused(vm(made, 2, "data"))).reason == "held_on_node"
    # the bus is newer than the host's copy: its holder was detached meanwhile
    bare = bare.model_copy(update={"generation": newer.generation + 1})
    await restore(made, subjects.vm_record(bare.node, uid(1)), encode(bare))
    async with hosts(made, newer):
        assert (await vm(made, 2, "data")).uid == uid(2)


@played(nodes=2)
async def test_data_on_another_node_than_the_bus_says_is_replaced_by_no_empty_disk(
    made: World,
) -> None:
    await make(made)
    unused = await value(made)
    one = await vm(made, 1, "data")
    (ref,) = one.volume_refs.values()
    used = await value(made)
    other = {"n1": "n2", "n2": "n1"}[one.node]
    await made.host.purge(subjects.vm_record(one.node, one.uid))
    # older than the first use; older than a move to the other node
    for older, there in ((unused, one.node), (used, other)):
        await restore(made, DATA, _free(older))
        async with hosts(made, data={there: ("a.b." + uid(9), ref.folder)}) as asked:
            error = await refused(vm(made, 2, "data"))
            assert (error.code, error.reason) == (409, "data_elsewhere")
            assert f"virtbus volume adopt data -n default --node {there}" in str(error)
            assert asked.count(f"{there} inspect") > 1
    # the data that the record names is used, with a copy of an earlier time elsewhere
    await restore(made, DATA, _free(used))
    both = dict.fromkeys(("n1", "n2"), (ref.folder,))
    async with hosts(made, data=both):
        assert (await vm(made, 2, "data")).node == one.node


@played(nodes=2)
async def test_the_refusal_names_the_host_that_does_not_answer(made: World) -> None:
    await make(made)
    one = await vm(made, 1, "data")
    (ref,) = one.volume_refs.values()
    other = {"n1": "n2", "n2": "n1"}[one.node]
    await made.host.purge(subjects.vm_record(one.node, one.uid))
    await restore(made, DATA, _free(await value(made)))
    async with hosts(made, data={other: (ref.folder,)}) as asked:
        made.server.drop = lambda subject: (
            f".{other}.rpc.imaged.inspect" in subject and f"{other} inspect" in asked
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(volume_orphans, "ASK_S", 2.0)
            error = await refused(vm(made, 2, "data"))
    assert (error.reason, f"{other} does not say" in str(error)) == ("volumes_unheard", True)


def _free(body: bytes) -> bytes:
    record = read(VolumeRecord, body)
    return encode(record.model_copy(update={"holder": "", "held_since_ns": 0}))


@played(nodes=2)
async def test_hosts_are_asked_once_and_a_silent_one_is_waited_for(made: World) -> None:
    await make(made)
    await make(made, "more", uid=uid(5))
    made.server.drop = lambda subject: ".n2.rpc." in subject
    assert (await refused(vm(made, 1, "data"))).reason == "volumes_unheard"
    assert await made.stored(uid(1)) is None
    made.server.drop = lambda _: False
    async with hosts(made) as asked:
        await vm(made, 1, "data")
        assert sorted(asked) == ["n1 inspect", "n2 inspect", "n2 records"]
        await vm(made, 2, "more")
        assert len(asked) == 3


@played(nodes=2)
async def test_a_pool_that_does_not_answer_holds_up_its_own_volumes_only(made: World) -> None:
    await make(made)
    async with hosts(made, unread={"n2": "nfs"}):
        assert (await vm(made, 1, "data")).uid == uid(1)
    await make(made, "more", uid=uid(5))
    async with hosts(made, unread={"n1": "local", "n2": "local"}):
        error = await refused(vm(made, 2, "more"))
        assert (error.code, error.reason) == (503, "volumes_unheard")
        assert "cannot read its pool local" in str(error)
    async with hosts(made):
        assert (await vm(made, 2, "more")).uid == uid(2)
