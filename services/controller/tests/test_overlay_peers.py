"""Peers of overlays as nodes receive them: who hears of a guest, and what that costs."""

import asyncio
from typing import Any

from services.controller.tests.fleets import node, record, uid
from services.controller.tests.test_address_pools import agents
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.overlay_peers import OverlayPeers
from virtbus.schemas import subjects
from virtbus.schemas.address_claim import ClaimedAddresses
from virtbus.schemas.network import guest_mac
from virtbus.schemas.network_object import NetworkRecord
from virtbus.schemas.overlay import OverlayPeer, TunnelEnd
from virtbus.schemas.records import read_network
from virtbus.schemas.vm import Network, VmRecord
from virtbus.schemas.wire import encode, read

HOSTS, MEMBERS = 20, 200
ALL_PEERS = f"$KV.vm.*.*.*.{subjects.PEER_KEY}"
OVERLAY = {"kind": "overlay", "subnet": "10.210.0.0/16"}


def end(number: int, mtu: int = 1500) -> TunnelEnd:
    return TunnelEnd(address=f"192.0.2.{number}", mtu=mtu)


async def hosts(made: World, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        await made.hear(node(f"n{number}", tunnel=end(number)))
    await asyncio.sleep(3)


async def network(made: World, name: str = "mesh", number: int = 900, **spec: Any) -> NetworkRecord:
    asked = {"name": name, "uid": uid(number), "spec": OVERLAY | spec}
    await made.ask("create", "network", **asked)
    entry = await made.host.get(subjects.network_record("default", name))
    assert entry is not None
    return read_network(entry.key, entry.value)


async def member(made: World, of: NetworkRecord, number: int, on: int) -> VmRecord:
    """Write the record of a VM on a host, as a create does."""
    one = record(number, node=f"n{on}")
    spec = one.spec.model_copy(update={"networks": (Network(name="default", network=of.name),)})
    claim = ClaimedAddresses(network=of.uid, addresses=(f"10.210.{number // 200}.{number % 200}",))
    update: dict[str, Any] = {
        "network_targets": {of.name: of.target},
        "address_claims": {"default": claim},
    }
    update["spec"] = spec
    one = one.model_copy(update=update)
    await made.host.put(subjects.vm_record(one.node, one.uid), encode(one))
    return one


async def newest(made: World) -> int:
    """Return the last revision of a peer's key, after some seconds."""
    await asyncio.sleep(5)
    last = 0
    async with made.host.watch(ALL_PEERS) as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                break
            if isinstance(item, Entry):
                last = max(last, item.revision)
    return last


async def peers(made: World, since: int = 0) -> dict[str, OverlayPeer | None]:
    """Return the peers' keys that were written after a revision; None: purged."""
    await asyncio.sleep(5)
    found: dict[str, OverlayPeer | None] = {}
    async with made.host.watch(ALL_PEERS) as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                return found
            if isinstance(item, Entry) and item.revision > since:
                there = item.kind is EntryKind.PUT
                found[item.key] = read(OverlayPeer, item.value) if there else None
    return found


@played(nodes=1)
async def test_hosts_hear_of_the_guests_of_their_own_networks_only(made: World) -> None:
    await hosts(made, 4)
    mesh, other = await network(made), await network(made, "red", 901, subnet="10.211.0.0/16")
    one = await member(made, mesh, 1, on=1)
    assert await peers(made) == {}  # nobody else has guests of it
    await member(made, mesh, 2, on=2)
    await member(made, other, 3, on=3)
    found = await peers(made)
    keys = {
        subjects.overlay_peer(*pair) for pair in (("n1", mesh.uid, "n2"), ("n2", mesh.uid, "n1"))
    }
    assert found.keys() == keys
    heard = found[subjects.overlay_peer("n2", mesh.uid, "n1")]
    assert heard is not None
    assert (heard.address, len(heard.members)) == ("192.0.2.1", 1)
    assert heard.members[0].mac == guest_mac(one.uid, "default")
    assert heard.members[0].addresses == ("10.210.0.1",)


@played(nodes=1)
async def test_a_join_costs_messages_to_the_hosts_of_its_network_only(made: World) -> None:
    await hosts(made, HOSTS + 5)
    mesh, other = await network(made), await network(made, "red", 901, subnet="10.211.0.0/16")
    for number in range(1, MEMBERS + 1):
        await member(made, mesh, number, on=number % HOSTS + 1)
    for number in (701, 702):
        await member(made, other, number, on=number - 680)  # on n21 and n22
    assert len(await peers(made)) == HOSTS * (HOSTS - 1) + 2
    last = await newest(made)
    await member(made, mesh, 500, on=7)
    written = await peers(made, last)
    assert written.keys() == {
        subjects.overlay_peer(f"n{number}", mesh.uid, "n7")
        for number in range(1, HOSTS + 1)
        if number != 7
    }
    assert {len(one.members) for one in written.values() if one} == {MEMBERS // HOSTS + 1}


@played(nodes=1)
async def test_many_joins_within_a_second_are_one_write_for_each_host(made: World) -> None:
    await hosts(made, 2)
    mesh = await network(made)
    await member(made, mesh, 1, on=1)
    await member(made, mesh, 2, on=2)
    last = await newest(made)
    for number in range(10, 40):
        await member(made, mesh, number, on=1)
    written = await peers(made, last)
    (heard,) = written.values()
    assert heard is not None
    assert len(heard.members) == 31
    assert await newest(made) - last <= 30 + 2  # the records, and at most two writes


@played(nodes=1)
async def test_a_host_without_guests_is_forgotten_and_a_silent_one_is_not(made: World) -> None:
    await hosts(made, 2)
    mesh = await network(made)
    await member(made, mesh, 1, on=1)
    two = await member(made, mesh, 2, on=2)
    assert len(await peers(made)) == 2
    made.controllers["c1"]._fleet.nodes.pop("n2")
    assert len([one for one in (await peers(made)).values() if one]) == 2
    await made.host.purge(subjects.vm_record("n2", two.uid))
    assert [one for one in (await peers(made)).values() if one] == []


@played(nodes=1)
async def test_keys_that_a_restored_bus_has_lost_are_written_again(made: World) -> None:
    await hosts(made, 2)
    mesh = await network(made)
    for number in (1, 2):
        await member(made, mesh, number, on=number)
    before = await peers(made)
    assert len(before) == 2
    bus, shelf = made.buses["c1"], made.server.shelf(next(iter(before)))
    bus.disconnect()
    for key in before:
        del shelf.entries[key]
    await asyncio.sleep(2)  # shorter than a lease
    bus.reconnect()
    assert await peers(made) == before


@played(nodes=1)
async def test_an_unreadable_peer_is_replaced(made: World) -> None:
    await hosts(made, 2)
    mesh = await network(made)
    for number in (1, 2):
        await member(made, mesh, number, on=number)
    before = await peers(made)
    for key in before:
        await made.host.put(key, b"\xc1")
    assert await peers(made) == before


@played(nodes=1)
async def test_overlays_have_numbers_of_their_own_and_an_mtu_that_all_hosts_carry(
    made: World,
) -> None:
    no_host = await refused(network(made))
    assert (no_host.reason, no_host.body.details[0].path) == ("network_impossible", "spec.kind")
    await made.hear(node("n1", tunnel=end(1)))
    await made.hear(node("n2", tunnel=end(2, mtu=1400)))
    await asyncio.sleep(3)
    large = await refused(network(made, mtu=1400))
    assert (large.reason, large.body.details[0].path) == ("network_impossible", "spec.mtu")
    assert "choose 1350 or less" in str(large)
    first = await network(made, mtu=1350)
    second = await network(made, "red", 901, subnet="10.211.0.0/16")
    assert 0 < first.vni != second.vni > 0
    larger = await refused(made.ask("update", "network", name="mesh", mtu=1351))
    assert (larger.reason, larger.body.details[0].path) == ("network_impossible", "spec.mtu")
    await made.hear(node("n2", tunnel=end(2, mtu=1300)))
    await made.ask("update", "network", name="mesh", protected=True)  # its MTU is as before


@played(nodes=1)
async def test_a_vm_of_an_overlay_needs_a_host_with_tunnels(made: World) -> None:
    await made.hear(node("n2", tunnel=end(2)))
    await asyncio.sleep(3)
    mesh = await network(made)
    async with agents(made, nodes=2):
        for number in (1, 2, 3):
            asked = {"name": f"vm-{number}", "image": "tiny", "uid": uid(number)}
            await made.ask("create", **asked, network=mesh.name)
            stored = await made.stored(uid(number))
            assert stored is not None
            assert stored.node == "n2"
            assert len(stored.address_claims) == 1
            assert stored.network_targets["mesh"].vni == mesh.vni


class Raced(MemoryBus):
    """A connection whose purges come right after a write of another controller."""

    async def purge(self, key: str, **how: Any) -> int:
        await self.put(key, LATER)
        return await super().purge(key, **how)


def peer(address: str) -> bytes:
    return encode(OverlayPeer(node="n1", network=uid(900), peer="n2", address=address))


LATER = peer("192.0.2.8")


async def test_a_purge_never_ends_a_later_value() -> None:
    server, term = MemoryServer(), LeaderTerm("fleet", 1, float("inf"))
    bus, key = MemoryBus(server), subjects.overlay_peer("n1", uid(900), "n2")
    value, fleet = peer("192.0.2.7"), Fleet()
    fleet.hosts.peers.put(key, value, await bus.put(key, value))
    async with background() as tasks:
        tasks.start(OverlayPeers(Raced(server), fleet).run(term))
        await asyncio.sleep(0.2)
        entry = await bus.get(key)
        assert entry is not None
        assert entry.value == LATER
