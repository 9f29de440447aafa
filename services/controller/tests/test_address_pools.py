"""Addresses of networks as a client gets them: pools, static addresses, claims, their release."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.controller.tests.fleets import node, status, uid
from services.controller.tests.test_network_api import make, of, paths, vm
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.core.address_plan import refuse_static
from virtbus.controller.core.quotas import Quota
from virtbus.schemas import subjects
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.network_object import NetworkSpec, NetworkTarget
from virtbus.schemas.node_rpc import KnownRecords
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord, VmSpec
from virtbus.schemas.wire import encode

POOL = {
    "kind": "isolated",
    "subnet": "10.9.0.0/24",
    "subnet6": "fd00:9::/64",
    "ranges": ["10.9.0.10-10.9.0.12"],
    "pool": "fleet",
}
MAC = "02:00:00:00:00:01"
NIC = "spec.domain.devices.interfaces[0]"


@asynccontextmanager
async def agents(made: World, *known: VmRecord, nodes: int = 1) -> AsyncIterator[None]:
    """The agents of all nodes, which have these records."""
    info = ServiceInfo("virtbus-agent", "1.0.0", "a test", {})

    def of_node(name: str) -> Any:
        async def records(_request: Request) -> KnownRecords:
            return KnownRecords(node=name, records=tuple(one for one in known if one.node == name))

        return Endpoint("records", subjects.rpc(name, "agent", "records"), records)

    endpoints = [of_node(f"n{number}") for number in range(1, nodes + 1)]
    async with MemoryBus(made.server, "agents").serve(info, endpoints):
        yield


def nics(*interfaces: Any) -> dict[str, Any]:
    return {
        "domain": {
            "devices": {
                "interfaces": [{"name": f"lan{at}"} | one for at, one in enumerate(interfaces)]
            }
        },
        "networks": [{"name": f"lan{at}", "network": "blue"} for at in range(len(interfaces))],
    }


async def static(made: World, number: int, *interfaces: Any) -> VmRecord:
    """Create a VM with these interfaces on the network `blue`."""
    asked = {"name": f"vm-{number}", "image": "tiny", "uid": uid(number)}
    await made.ask("create", **asked, spec=nics(*interfaces))
    stored = await made.stored(uid(number))
    assert stored is not None
    return stored


def given(of_vm: VmRecord) -> list[str]:
    return [one for claims in of_vm.address_claims.values() for one in claims.addresses]


async def claimed(made: World) -> set[str]:
    """Return the addresses that are claimed on the bus."""
    found = made.server.shelf(subjects.ADDRESS_KEYS + "x.y").listed((f"{subjects.ADDRESS_KEYS}>",))
    return {subjects.claimed_address(one.key)[1] for one in found if one.value}


# --- pools of a network -------------------------------------------------------------------
@played()
async def test_bad_pools_are_refused_with_their_fields(made: World) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "spec.subnet6": {"subnet6": "fe80::/64"},
        "spec.gateway6": {"gateway6": "fd01::1", "kind": "nat"},
        "spec.ranges[0]": {"ranges": ["10.10.0.1-10.10.0.9"]},
        "spec.ranges[1]": {"ranges": ["10.9.0.1-10.9.0.9", "10.9.0.9"]},
        "spec.excluded[0]": {"excluded": ["192.0.2.1"]},
        "spec.excluded": {"ranges": ["10.9.0.5"], "excluded": ["10.9.0.5"]},
        "spec.subnets": {"kind": "routed", "subnet": None, "subnet6": None, "pool": None},
    }
    for path, change in wrong.items():
        error = await refused(make(made, spec={**POOL, "ranges": [], **change}))
        assert error.code == 400, change
        assert path in paths(error), (change, paths(error))
    for malformed in ("10.9.0.9-10.9.0.1", "10.9.0.1-fd00::1", "ten", "10.9.0.1-"):
        error = await refused(make(made, spec={**POOL, "ranges": [malformed]}))
        assert (error.code, paths(error)) == (400, ["spec.ranges[0]"]), malformed


@played()
async def test_an_ipv6_subnet_that_a_host_routes_is_in_one_network(made: World) -> None:
    await made.hear(node("n1", addresses=("2001:db8::7",), guest_subnet6="fd00:127::/64"))
    nat = {"kind": "nat", "subnet": "10.200.0.0/24", "subnet6": "fd00:1::/64"}
    await make(made, spec=nat)
    for subnet6 in ("fd00:1::/72", "2001:db8::/64", "fd00:127::/80"):
        spec = {"kind": "nat", "subnet": "10.201.0.0/24", "subnet6": subnet6}
        error = await refused(make(made, "red", 2, spec=spec))
        assert (error.reason, paths(error)) == ("subnet_taken", ["spec.subnet6"])


# --- claims -------------------------------------------------------------------------------
@played()
async def test_a_vm_gets_addresses_of_both_versions_and_keeps_them_in_a_repeat(made: World) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        first = await vm(made)
        four, six = given(first)
        assert four in {"10.9.0.10", "10.9.0.11", "10.9.0.12"}
        assert six.startswith("fd00:9::")
        assert await claimed(made) == {four, six}
        assert given(await vm(made)) == [four, six]
        assert await claimed(made) == {four, six}
        assert (await of(made, "get")).given == 2


@played()
async def test_an_exhausted_pool_is_refused_and_leaves_nothing(made: World) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        for number in (3, 4, 5):
            await vm(made, number)
        before = await claimed(made)
        error = await refused(vm(made, 6))
        assert (error.code, error.reason, paths(error)) == (429, "pool_exhausted", [f"{NIC}.name"])
        assert await made.stored(uid(6)) is None
        assert await claimed(made) == before


@played()
async def test_static_addresses_are_checked_and_belong_to_one_vm(made: World) -> None:
    async with agents(made):
        await make(made, spec=POOL | {"excluded": ["10.9.0.66"]})
        mine = {"addresses": ["10.9.0.200", "10.9.0.201", "fd00:9::5"], "mac_address": MAC}
        first = await static(made, 1, mine)
        assert given(first) == mine["addresses"]
        assert await claimed(made) == {*mine["addresses"], MAC}
        taken = await refused(static(made, 2, {"addresses": ["10.9.0.201"]}))
        assert (taken.code, taken.reason) == (409, "address_taken")
        assert paths(taken) == [f"{NIC}.addresses[0]"]
        assert uid(1) in str(taken)
        same = await refused(static(made, 2, {"mac_address": MAC}))
        assert (same.reason, paths(same)) == ("address_taken", [f"{NIC}.mac_address"])
        for bad in ("10.9.0.1", "10.9.0.0", "10.9.0.255", "10.9.0.66", "10.8.0.5", "fd00:8::5"):
            error = await refused(static(made, 2, {"addresses": [bad]}))
            assert (error.code, paths(error)) == (400, [f"{NIC}.addresses[0]"]), bad
        part = await refused(static(made, 2, {"addresses": ["10.9.0.7", "10.9.0.201"]}))
        assert paths(part) == [f"{NIC}.addresses[1]"]
        twice = [{"addresses": ["10.9.0.7"]}, {"addresses": ["10.9.0.7"]}]
        assert (await refused(static(made, 2, *twice))).code == 400
        assert await claimed(made) == {*mine["addresses"], MAC}


@played()
async def test_addresses_are_free_after_the_confirmed_end_and_reused_oldest_first(
    made: World,
) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        owners = [await vm(made, number) for number in (3, 4, 5)]
        order = [owners[1], owners[0]]
        for one in order:
            await made.ask("delete", uid=one.uid)
            assert given(one)[0] in await claimed(made)  # the guest may still run
            await made.say(status(one, VmState.DELETING, released=True))
            await settle()
            assert given(one)[0] not in await claimed(made)
        again = [given(await vm(made, number))[0] for number in (6, 7)]
        assert again == [given(one)[0] for one in order]


@played()
async def test_a_refused_create_frees_its_addresses(made: World) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        await vm(made, 7)
        before = await claimed(made)
        asked = {"name": "vm-7", "image": "tiny", "network": "blue", "uid": uid(8)}
        assert (await refused(made.ask("create", **asked))).reason == "exists_unchanged"
        await settle()
        assert await claimed(made) == before


@played()
async def test_an_added_interface_gets_addresses_and_a_removed_one_frees_them_when_it_is_gone(
    made: World,
) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        await vm(made, network="default")
        view = await made.ask("get", uid=uid(7))
        bare = view["spec"]
        spec = {**bare, "networks": [*bare["networks"], {"name": "late", "network": "blue"}]}
        devices = bare["domain"]["devices"]
        more = {**devices, "interfaces": [*devices["interfaces"], {"name": "late"}]}
        spec["domain"] = {**bare["domain"], "devices": more}
        await made.ask("update", uid=uid(7), revision=view["revision"], spec=spec)
        there = await made.stored(uid(7))
        assert there is not None
        assert set(given(there)) == await claimed(made)
        revision = (await made.ask("get", uid=uid(7)))["revision"]
        await made.ask("update", uid=uid(7), revision=revision, spec=bare)
        leaving = await made.stored(uid(7))
        assert leaving is not None
        both = tuple(
            InterfaceStatus(name=name, network="x", mac=MAC) for name in ("default", "late")
        )
        await made.say(status(leaving, interfaces=both))
        await settle()
        assert await claimed(made)  # the guest still has the device
        await made.say(status(leaving, interfaces=both[:1], updated_ns=1))
        await settle()
        assert await claimed(made) == set()


@played()
async def test_a_quota_bounds_the_claims_of_a_network(made: World) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        made.controllers["c1"]._vms.addresses._quota = Quota(2, 100)
        await vm(made, 3)
        await settle()
        error = await refused(vm(made, 4))
        assert (error.code, error.reason) == (429, "address_quota")


# --- a restored bus -----------------------------------------------------------------------
@played(nodes=2)
async def test_an_address_that_only_a_host_knows_is_not_given_out(made: World) -> None:
    await make(made, spec=POOL)
    async with agents(made, nodes=2):
        lost = [await vm(made, number) for number in (3, 4)]
    for one in lost:  # the bus is restored from an older backup
        await made.host.purge(subjects.vm_record(one.node, one.uid))
        for address in given(one):
            await made.host.purge(subjects.address_claim(uid(1), address))
    await settle()
    for asked in made.controllers["c1"]._vms.addresses._living._asked_s.copy():
        del made.controllers["c1"]._vms.addresses._living._asked_s[asked]
    made.server.drop = lambda subject: ".rpc.agent." in subject
    assert (await refused(vm(made, 5))).reason == "addresses_unheard"
    made.server.drop = lambda _: False
    async with agents(made, *lost, nodes=2):
        third = await vm(made, 5)
        assert given(third)[0] not in {given(one)[0] for one in lost}
        assert (await refused(vm(made, 6))).reason == "pool_exhausted"
        named = await refused(static(made, 6, {"addresses": [given(lost[0])[0]]}))
        assert (named.reason, lost[0].uid in str(named)) == ("address_taken", True)


@played()
async def test_a_lost_claim_comes_back_with_its_vm(made: World) -> None:
    async with agents(made):
        await make(made, spec=POOL)
        kept = await vm(made)
        key = subjects.address_claim(uid(1), given(kept)[0])
        await made.host.purge(key)
        await settle()
        (finding,) = made.controllers["c1"]._audits._unclaimed(kept.node)
        assert f"{given(kept)[0]}: nobody claims it" in finding.what
        commits = made.controllers["c1"]._rebuilds._commits
        await commits.write_back(kept, await commits.known(kept.uid))
        assert set(given(kept)) <= await claimed(made)


@played()
async def test_a_claim_without_a_vm_is_swept(made: World) -> None:
    await make(made, spec=POOL)
    key = subjects.address_claim(uid(1), "10.9.0.10")
    await made.host.put(key, encode(AddressClaim(vm=uid(9))))
    await settle()
    assert await claimed(made) == {"10.9.0.10"}
    await asyncio.sleep(400)
    assert await claimed(made) == set()


@pytest.mark.parametrize(
    ("capabilities", "address", "hint"),
    [
        ({"ips": True}, "10.9.0.7", ""),
        ({}, "10.9.0.7", "capability ips"),
        ({"ips": True}, "fd00:9::7", ""),
        ({}, "fd00:9::7", "capability ips"),
    ],
)
def test_plugins_take_static_addresses_by_the_capability_ips(
    capabilities: dict[str, bool], address: str, hint: str
) -> None:
    plugins = [{"type": "bridge", "capabilities": capabilities}]
    config = json.dumps({"cniVersion": "1.0.0", "plugins": plugins})
    target = NetworkTarget(
        uid=uid(900), namespace="default", name="blue", spec=NetworkSpec(kind="cni", config=config)
    )
    spec = VmSpec.model_validate(nics({"addresses": [address]}))
    if not hint:
        refuse_static(spec, {"blue": target})
        return
    with pytest.raises(VirtbusError, match=hint) as error:
        refuse_static(spec, {"blue": target})
    assert error.value.body.details[0].path == f"{NIC}.addresses[0]"
