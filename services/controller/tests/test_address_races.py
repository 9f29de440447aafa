"""No address is given to two VMs, in every order of bus calls and after every crash (ADR 0064)."""

from typing import Any

import pytest
from services.controller.tests.fleets import record, uid
from services.controller.tests.schedules import (
    Gates,
    ScheduledBus,
    broken_everywhere,
    explore,
)
from services.controller.tests.test_commit import (
    check_clean,
    check_names,
    created,
    records,
    standing,
    sweep,
    swept,
)

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import ConflictError
from virtbus.controller.core.claims import addresses_of
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.quotas import Quota
from virtbus.controller.edge.address_claims import AddressClaims
from virtbus.controller.edge.commit import Commits, Committed
from virtbus.controller.edge.living_claims import LivingClaims
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network_object import NetworkKind, NetworkSpec, NetworkTarget, PoolScope
from virtbus.schemas.vm import Interface, Network, VmRecord

NET = "0192f0c1-0000-7abc-8def-0000000000aa"
SMALL = NetworkSpec(kind=NetworkKind.ISOLATED, subnet="10.9.0.0/29", pool=PoolScope.FLEET)


def on_network(number: int, *, address: str = "", network: NetworkSpec = SMALL) -> VmRecord:
    """Return a record with an interface on the network, before its addresses are claimed."""
    static = {"addresses": (address,)} if address else {}
    bare = record(number, f"vm-{number}")
    return with_nic(bare, Interface(name="lan", **static), network)


def with_nic(of: VmRecord, nic: Interface, network: NetworkSpec = SMALL) -> VmRecord:
    """Return the record with a further interface."""
    devices = of.spec.domain.devices
    devices = devices.model_copy(update={"interfaces": (*devices.interfaces, nic)})
    spec = of.spec.model_copy(
        update={
            "domain": of.spec.domain.model_copy(update={"devices": devices}),
            "networks": (*of.spec.networks, Network(name=nic.name, network="blue")),
        }
    )
    target = NetworkTarget(uid=NET, namespace="default", name="blue", spec=network)
    return of.model_copy(update={"spec": spec, "network_targets": {"blue": target}})


async def create(bus: MemoryBus, wanted: VmRecord) -> Committed:
    """Claim the addresses and create the VM, as the API does."""
    claims = AddressClaims(bus, fleet := Fleet(), Quota(100, 100), LivingClaims(bus, fleet))
    claimed = await claims.claim(wanted)
    try:
        return await Commits(bus).create(claimed, None, addresses_of(claimed))
    except VirtbusError:
        await claims.give_back(claimed)
        raise


async def plug(bus: MemoryBus, number: int, nic: Interface) -> str:
    """Add an interface to a VM, as `vm.update` does."""
    fleet, commits = Fleet(), Commits(bus)
    claims = AddressClaims(bus, fleet, Quota(100, 100), LivingClaims(bus, fleet))
    held = await commits.latest(uid(number))
    assert held is not None
    wanted = await claims.claim(with_nic(held.record, nic), held.record)
    try:
        await commits.replace(held, wanted)
    except (VirtbusError, ConflictError):
        await claims.give_back(wanted, held.record)
        raise
    return "plugged"


def holders(server: MemoryServer) -> dict[str, str]:
    """Return the uid by address."""
    found = standing(server)
    return {
        subjects.claimed_address(key)[1]: value["vm"]
        for key, value in found.items()
        if key.startswith(subjects.ADDRESS_KEYS)
    }


async def settled(server: MemoryServer) -> None:
    for _ in range(2):
        await swept(server)
    check_clean(server)


@pytest.mark.parametrize("sweeps", [0, 1])
async def test_one_of_two_vms_gets_a_static_address_in_every_order(sweeps: int) -> None:
    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        work: dict[str, Any] = {
            f"c{i}": create(ScheduledBus(server, f"c{i}", gates), on_network(i, address="10.9.0.5"))
            for i in (1, 2)
        }
        work |= {f"s{i}": sweep(ScheduledBus(server, f"s{i}", gates)) for i in range(sweeps)}
        results = await gates.run(work)
        check_names(server)
        assert len(records(server)) <= 1
        for result in results.values():
            assert not isinstance(result, Exception) or isinstance(result, VirtbusError), result
        await settled(server)

    assert await explore(scenario, pauses=2) > 20


async def test_vms_that_choose_from_one_pool_get_different_addresses_in_every_order() -> None:
    tight = SMALL.model_copy(update={"ranges": ("10.9.0.3-10.9.0.4",)})

    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        work = {
            f"c{i}": create(ScheduledBus(server, f"c{i}", gates), on_network(i, network=tight))
            for i in (1, 2)
        }
        results = await gates.run(work)
        check_names(server)
        assert all(map(created, results.values())), results
        assert set(holders(server)) == {"10.9.0.3", "10.9.0.4"}

    assert await explore(scenario, pauses=2) > 10


async def test_an_update_keeps_its_address_or_fails_against_a_sweep_in_every_order() -> None:
    """The claim is an orphan until the update commits, and this sweep has no grace."""

    async def scenario(gates: Gates) -> None:
        server = MemoryServer()
        await Commits(MemoryBus(server)).create(record(1), None)
        nic = Interface(name="late", addresses=("10.9.0.5",))
        rival = create(ScheduledBus(server, "r", gates), on_network(2, address="10.9.0.5"))
        await gates.run(
            {
                "u": plug(ScheduledBus(server, "u", gates), 1, nic),
                "s": sweep(ScheduledBus(server, "s", gates)),
                "r": rival,
            }
        )
        check_names(server)
        await settled(server)

    assert await explore(scenario, pauses=2) > 20


async def test_a_crash_at_any_call_leaves_nothing_and_a_repeat_succeeds() -> None:
    async def prepare() -> MemoryServer:
        return MemoryServer()

    async def use(bus: MemoryBus) -> None:
        await create(bus, on_network(1))

    async for server in broken_everywhere(prepare, use):
        check_names(server)
        done = await create(MemoryBus(server), on_network(1))
        assert done.held.record.uid == uid(1)
        check_names(server)
        await settled(server)
        assert len(holders(server)) == 1


async def test_a_crash_of_an_update_at_any_call_leaves_no_claim() -> None:
    async def prepare() -> MemoryServer:
        server = MemoryServer()
        await Commits(MemoryBus(server)).create(record(1), None)
        return server

    async def use(bus: MemoryBus) -> None:
        await plug(bus, 1, Interface(name="late"))

    async for server in broken_everywhere(prepare, use):
        check_names(server)
        await settled(server)
        assert len(holders(server)) == len(records(server)[0].address_claims)


async def test_a_delete_that_crashes_at_any_call_releases_the_addresses_at_last() -> None:
    async def prepare() -> MemoryServer:
        server = MemoryServer()
        await create(MemoryBus(server), on_network(1))
        return server

    async def use(bus: MemoryBus) -> None:
        held = await Commits(bus).latest(uid(1))
        assert held is not None
        await Commits(bus).finish(held)

    async for server in broken_everywhere(prepare, use):
        check_names(server)
        await settled(server)
        assert len(holders(server)) == len(records(server))
