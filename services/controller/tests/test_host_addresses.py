"""Addresses of hosts as nodes receive them, and networks that are closed to a namespace."""

import asyncio

import pytest
from services.controller.tests.fleets import node, spec
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World

from virtbus.bus.client.ports import EntryKind
from virtbus.controller.core.network_access import check_networks
from virtbus.controller.edge.host_addresses import PER_HOST
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import HostAddresses
from virtbus.schemas.vm import Network
from virtbus.schemas.wire import read


async def told(made: World, name: str) -> HostAddresses | None:
    """Return a node's list of addresses."""
    await asyncio.sleep(5)
    entry = await made.host.get(subjects.node_hosts(name))
    there = entry is not None and entry.kind is EntryKind.PUT
    return read(HostAddresses, entry.value) if entry and there else None


@played(nodes=2, controllers=2)
async def test_each_node_gets_the_addresses_of_all_hosts(made: World) -> None:
    assert await told(made, "n1") is None
    await made.hear(node("n1", addresses=("192.0.2.1", "2001:db8::1")))
    await made.hear(node("n2", addresses=("192.0.2.2",)))
    every = ("192.0.2.1", "192.0.2.2", "2001:db8::1")
    for name, own in (("n1", ("192.0.2.1", "2001:db8::1")), ("n2", ("192.0.2.2",))):
        assert await told(made, name) == HostAddresses(node=name, own=own, fleet=every)


@played(nodes=2)
async def test_a_silent_host_stays_closed_and_a_new_one_is_added(made: World) -> None:
    await made.hear(node("n1", addresses=("192.0.2.1",)))
    await told(made, "n1")
    await made.host.purge(subjects.node_record("n1"))
    made.controllers["c1"]._fleet.nodes.pop("n1")
    await made.hear(node("n3", addresses=("192.0.2.3",)))
    third = await told(made, "n3")
    assert third is not None
    assert third.fleet == ("192.0.2.1", "192.0.2.3")


@played(nodes=2)
async def test_an_unchanged_fleet_costs_no_write(made: World) -> None:
    await made.hear(node("n1", addresses=("192.0.2.1",)))
    await told(made, "n1")
    before = await made.host.get(subjects.node_hosts("n2"))
    await asyncio.sleep(60)
    await made.hear(node("n1", addresses=("192.0.2.1",)))
    await asyncio.sleep(5)
    after = await made.host.get(subjects.node_hosts("n2"))
    assert before is not None
    assert after is not None
    assert before.revision == after.revision


@played(nodes=2)
async def test_keys_that_a_restored_bus_has_lost_are_written_again(made: World) -> None:
    await made.hear(node("n1", addresses=("192.0.2.1",)))
    before = await told(made, "n2")
    bus, key = made.buses["c1"], subjects.node_hosts("n2")
    bus.disconnect()
    del made.server.shelf(key).entries[key]
    await asyncio.sleep(2)  # shorter than a lease
    bus.reconnect()
    assert await told(made, "n2") == before
    assert before is not None


@played(nodes=2)
async def test_an_unreadable_list_of_addresses_is_replaced(made: World) -> None:
    await made.hear(node("n1", addresses=("192.0.2.1",)))
    before = await told(made, "n2")
    await made.host.put(subjects.node_hosts("n2"), b"\xc1")
    assert await told(made, "n2") == before
    assert before is not None


@played(nodes=2)
async def test_one_host_cannot_close_the_world_to_the_guests_of_others(made: World) -> None:
    many = tuple(f"198.51.100.{number}" for number in range(200))
    await made.hear(node("n1", addresses=many))
    second = await told(made, "n2")
    assert second is not None
    assert len(second.fleet) == PER_HOST


OFFER = node("n1", networks=("default", "lan"), network_namespaces={"lan": ("team",)})
LAN = spec(networks=(Network(name="a"), Network(name="b", network="lan")))


def test_a_network_is_refused_to_a_namespace_that_no_node_opens_it_to() -> None:
    with pytest.raises(VirtbusError, match="not open to the namespace 'other'") as caught:
        check_networks(LAN, "other", [OFFER, node("n2")])
    assert [one.path for one in caught.value.body.details] == ["spec.networks[1].network"]
    assert caught.value.reason == "network_closed"


@pytest.mark.parametrize(
    ("namespace", "allowed"), [("team", ("team",)), ("anybody", ("*",)), ("team", ("a", "team"))]
)
def test_a_network_is_open_to_the_namespaces_that_it_names(
    namespace: str, allowed: tuple[str, ...]
) -> None:
    check_networks(LAN, namespace, [node(network_namespaces={"lan": allowed}, networks=("lan",))])


def test_placement_refuses_a_network_that_no_node_offers() -> None:
    check_networks(LAN, "other", [node()])
    check_networks(spec(), "other", [OFFER])


@played()
async def test_a_create_on_a_closed_network_is_refused_with_its_field(made: World) -> None:
    await made.hear(OFFER)
    await asyncio.sleep(1)
    with pytest.raises(VirtbusError, match=r"spec\.networks"):
        await made.vm("create", name="web", image="tiny", network="lan")
    await made.vm("create", name="web", image="tiny", network="lan", namespace="team")
