"""Names of VMs: nodes ask for their guests, and get VMs of the guest's namespace only."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import record, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.vm_names import answer
from virtbus.schemas import subjects
from virtbus.schemas.names import NameAnswer, NameAsk
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import validate


def at(address: str, name: str = "net0") -> InterfaceStatus:
    return InterfaceStatus(name=name, mac="02:00:00:00:00:01", addresses=(address,))


async def vm(made: World, number: int, name: str, namespace: str, *addresses: str) -> None:
    await made.vm("create", name=name, namespace=namespace, image="tiny", uid=uid(number))
    held = await made.stored(uid(number))
    assert held is not None
    await made.say(status(held, interfaces=tuple(at(one) for one in addresses)))
    await settle()


async def ask(made: World, node: str, number: int, **what: str) -> NameAnswer:
    value: Any = NameAsk(uid=uid(number), **what)
    return validate(
        NameAnswer, await made.host.request(subjects.names_ask(node), value, timeout_s=10)
    )


@played()
async def test_a_guest_finds_the_vms_of_its_namespace_by_name_and_by_address(made: World) -> None:
    await vm(made, 1, "web", "shop", "10.127.0.5/16")
    await vm(made, 2, "db", "shop", "10.127.0.6/16", "fd00::6/64")
    found = NameAnswer(
        found=True,
        node="n1",
        namespace="shop",
        name="db",
        addresses=("10.127.0.6", "fd00::6"),
    )
    assert await ask(made, "n1", 1, namespace="shop", name="db") == found
    assert await ask(made, "n1", 1, address="fd00::6") == found
    assert not (await ask(made, "n1", 1, namespace="shop", name="cache")).found
    assert not (await ask(made, "n1", 1, address="10.127.0.7")).found


@played()
async def test_a_vm_without_addresses_has_a_name(made: World) -> None:
    await vm(made, 1, "web", "shop", "10.127.0.5/16")
    await made.vm("create", name="new", namespace="shop", image="tiny", uid=uid(2))
    found = await ask(made, "n1", 1, namespace="shop", name="new")
    assert (found.found, found.addresses) == (True, ())


@played()
async def test_names_of_other_namespaces_are_not_known(made: World) -> None:
    await vm(made, 1, "web", "shop", "10.127.0.5/16")
    await vm(made, 2, "db", "bank", "10.127.0.6/16")
    assert await ask(made, "n1", 1, namespace="bank", name="db") == NameAnswer()
    assert await ask(made, "n1", 1, address="10.127.0.6") == NameAnswer()
    for openings, found in (({"bank": ("shop",)}, True), ({"bank": ("*",)}, True), ({}, False)):
        opened = made.controllers["c1"]._settings.names_open_to
        opened.clear()
        opened.update(openings)
        assert (await ask(made, "n1", 1, namespace="bank", name="db")).found is found
        assert (await ask(made, "n1", 1, address="10.127.0.6")).found is found
        assert not (await ask(made, "n1", 2, namespace="shop", name="web")).found


@played(nodes=2)
async def test_a_node_asks_for_its_own_vms_only(made: World) -> None:
    await vm(made, 1, "web", "shop", "10.127.0.5/16")
    held = await made.stored(uid(1))
    assert held is not None
    other = {"n1": "n2", "n2": "n1"}[held.node]
    for node, number in ((other, 1), (held.node, 9)):
        error = await refused(ask(made, node, number, namespace="shop", name="web"))
        assert (error.code, error.reason) == (403, "not_on_node")


@played()
async def test_a_new_address_is_found_within_the_age_of_the_index(made: World) -> None:
    await vm(made, 1, "web", "shop", "10.127.0.5/16")
    assert (await ask(made, "n1", 1, address="10.127.0.5")).found
    await vm(made, 2, "db", "shop", "10.127.0.6/16")
    await asyncio.sleep(5)
    assert (await ask(made, "n1", 1, address="10.127.0.6")).name == "db"
    held = await made.stored(uid(2))
    assert held is not None
    await made.say(status(held, interfaces=(at("10.127.0.7/16"),)))
    await settle()
    assert not (await ask(made, "n1", 1, address="10.127.0.6")).found


def test_one_address_on_many_nodes_is_answered_for_each_namespace() -> None:
    fleet = Fleet()
    for number, namespace in ((1, "shop"), (2, "bank")):
        held = record(number, "web", namespace=namespace, node=f"n{number}")
        fleet.apply(StoredVm(held, number))
        seen: VmStatus = status(held, interfaces=(at("10.127.0.5/16"),))
        fleet.statuses[held.node, held.uid] = (seen, number)
    for namespace, node in (("shop", "n1"), ("bank", "n2")):
        asker = record(3, "asks", namespace=namespace)
        found = answer(fleet, [uid(1), uid(2)], asker, {}, "10.127.0.5")
        assert (found.namespace, found.node) == (namespace, node)


@pytest.mark.parametrize("shared", [False, True])
def test_a_network_that_shares_names_has_those_of_all_namespaces(*, shared: bool) -> None:
    def on(number: int, namespace: str) -> VmRecord:
        spec = {"kind": "overlay", "subnet": "10.9.0.0/16", "share_names": shared}
        network = {"uid": uid(9), "namespace": "_", "name": "mesh", "spec": spec}
        return record(number, namespace=namespace, network_targets={"mesh": network})

    fleet = Fleet()
    fleet.apply(StoredVm(on(1, "shop"), 1))
    assert answer(fleet, [uid(1)], on(2, "bank"), {}).found is shared
    assert not answer(fleet, [uid(1)], record(3, namespace="bank"), {}).found
