"""Networks on segments as a client gets them: their pools, and addresses of one LAN only once."""

from typing import Any

import pytest
from services.controller.tests.fleets import node, status, uid
from services.controller.tests.test_address_pools import MAC, NIC, agents, claimed, given, static
from services.controller.tests.test_network_api import BLUE, make, of, paths, vm
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world

from virtbus.schemas.states import VmState

LAN: dict[str, Any] = {
    "kind": "bridge",
    "link": "br-lan",
    "subnet": "192.0.2.0/28",
    "gateway": "192.0.2.1",
    "dns": ["192.0.2.1"],
    "ranges": ["192.0.2.4-192.0.2.6"],
}
V6 = {"subnet6": "2001:db8:5::/64", "gateway6": "fe80::1"}
LINKS = {"br-lan": "bridge", "eth1": "macvtap"}


@played()
async def test_bad_fields_of_segments_are_refused_with_their_paths(made: World) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "spec.gateway": {"gateway": "192.0.3.1"},
        "spec.gateway6": V6 | {"gateway6": "2001:db8:5::1"},
        "spec.ranges[0]": {"ranges": ["192.0.3.4"]},
        "spec.excluded[0]": {"excluded": ["192.0.3.4"]},
        "spec.pool": {"pool": "fleet"},
        "spec.subnet": {"subnet": "127.0.0.0/24", "gateway": None, "ranges": []},
    }
    for path, change in wrong.items():
        error = await refused(make(made, spec=LAN | change))
        assert (error.code, paths(error)) == (400, [path]), change
    lonely = await refused(make(made, spec={"kind": "macvtap", "link": "eth1", "gateway6": "::5"}))
    assert paths(lonely) == ["spec.gateway6"]
    of_nat = {"kind": "nat", "subnet": "10.9.0.0/24", "subnet6": "fd00:9::/64"}
    assert paths(await refused(make(made, spec=of_nat | {"gateway6": "fe80::1"}))) == [
        "spec.gateway6"
    ]


@pytest.mark.parametrize(("link", "kind"), LINKS.items())
def test_an_mtu_that_the_link_of_a_host_does_not_carry_is_refused(link: str, kind: str) -> None:
    async def body() -> None:
        async with world() as made:
            await made.hear(node("n1", links=LINKS, link_mtus={link: 9000}))
            await made.hear(node("n2", links=LINKS, link_mtus={link: 1400}))
            await made.hear(node("n3", links=LINKS))  # a netd that does not tell MTUs
            await settle()
            spec = {"kind": kind, "link": link}
            error = await refused(make(made, spec=spec | {"mtu": 1401}))
            assert (error.code, error.reason) == (422, "network_impossible")
            assert (paths(error), await made.client.get(BLUE)) == (["spec.mtu"], None)
            assert f"{link} of n2 carries 1400 bytes; choose 1400 or less" in str(error)
            await make(made, spec=spec | {"mtu": 1400})
            error = await refused(of(made, "update", mtu=1401))
            assert (error.reason, paths(error)) == ("network_impossible", ["spec.mtu"])
            assert (await of(made, "update", mtu=1300)).spec.mtu == 1300

    run(body)


@played()
async def test_only_segments_have_ipv6_alone_and_name_servers_of_ipv6(made: World) -> None:
    await made.hear(node("n1", links=LINKS))
    alone = {"kind": "bridge", "link": "br-lan", "dns": ["2001:db8::53"], **V6}
    assert (await make(made, spec=alone)).spec.dns == ("2001:db8::53",)
    for kind in ("nat", "overlay", "isolated"):
        error = await refused(make(made, "red", 2, spec={"kind": kind, "subnet6": "fd00:9::/64"}))
        assert (error.code, paths(error)) == (400, ["spec.subnet", "spec.subnet6"])
    routed = {"kind": "routed", "subnets": {"n1": "10.9.0.0/24"}}
    error = await refused(make(made, "red", 2, spec=routed | {"subnets6": {"n2": "fd00:9::/64"}}))
    assert paths(error) == ["spec.subnets6.n2"]
    error = await refused(make(made, "red", 2, spec=routed | {"dns": ["10.0.0.1", "fd00::53"]}))
    assert paths(error) == ["spec.dns[1]"]
    error = await refused(make(made, "red", 2, spec=alone | {"dns": ["ff02::1"]}))
    assert paths(error) == ["spec.dns[0]"]


@played()
async def test_addresses_of_ipv6_alone_are_claimed_on_a_segment(made: World) -> None:
    async with agents(made):
        await made.hear(node("n1", links=LINKS))
        spec = {"kind": "bridge", "link": "br-lan", "ranges": ["2001:db8:5::a-2001:db8:5::b"], **V6}
        await make(made, spec=spec)
        found = [given(await vm(made, number)) for number in (3, 4)]
        assert sorted(found) == [["2001:db8:5::a"], ["2001:db8:5::b"]]
        full = await refused(vm(made, 5))
        assert (full.reason, paths(full)) == ("pool_exhausted", [f"{NIC}.name"])
        assert given(await static(made, 5, {"addresses": ["2001:db8:5::9"]})) == ["2001:db8:5::9"]
        four = await refused(static(made, 6, {"addresses": ["192.0.2.9"]}))
        assert paths(four) == [f"{NIC}.addresses[0]"]


@pytest.mark.parametrize(("link", "kind"), LINKS.items())
def test_addresses_of_a_segment_are_claimed_and_no_host_has_one(link: str, kind: str) -> None:
    run(lambda: _addresses_are_claimed(LAN | V6 | {"kind": kind, "link": link}))


async def _addresses_are_claimed(spec: dict[str, Any]) -> None:
    async with world() as made, agents(made):
        await made.hear(node("n1", links=LINKS, addresses=("192.0.2.5", "198.51.100.5")))
        await make(made, spec=spec)
        found = [given(await vm(made, number)) for number in (3, 4)]
        assert {one[0] for one in found} == {"192.0.2.4", "192.0.2.6"}
        assert all(one[1].startswith("2001:db8:5:") for one in found)
        assert await claimed(made) == {address for one in found for address in one}
        full = await refused(vm(made, 5))
        assert (full.reason, paths(full)) == ("pool_exhausted", [f"{NIC}.name"])
        host = await refused(static(made, 5, {"addresses": ["192.0.2.5"]}))
        assert (host.reason, paths(host)) == ("address_taken", [f"{NIC}.addresses[0]"])
        assert "the node n1 has 192.0.2.5" in str(host)
        mine = await static(made, 5, {"addresses": ["192.0.2.9", "2001:db8:5::9"]})
        assert given(mine) == ["192.0.2.9", "2001:db8:5::9"]
        same = await refused(static(made, 6, {"addresses": ["192.0.2.9"]}))
        assert (same.reason, paths(same)) == ("address_taken", [f"{NIC}.addresses[0]"])


@played()
async def test_networks_of_one_segment_do_not_overlap(made: World) -> None:
    await made.hear(node("n1", links=LINKS, addresses=("192.0.2.5",)))
    await make(made, spec=LAN)
    for subnet in ("192.0.2.0/28", "192.0.0.0/16"):
        spec = LAN | {"subnet": subnet}
        error = await refused(make(made, "red", 2, spec=spec))
        assert (error.reason, paths(error)) == ("subnet_taken", ["spec.subnet"])
    other = await make(made, "red", 2, spec=LAN | {"vlan": 7})
    assert other.state == "Ready"
    assert (await of(made, "get")).spec.gateway == "192.0.2.1"


@played(nodes=2)
async def test_a_mac_is_on_a_segment_once_also_without_a_subnet(made: World) -> None:
    for name in ("n1", "n2"):
        await made.hear(node(name, links=LINKS))
    async with agents(made, nodes=2):
        await make(made, spec={"kind": "macvtap", "link": "eth1"})
        first = await static(made, 5, {"mac_address": MAC})
        assert (given(first), await claimed(made)) == ([], {MAC})
        same = await refused(static(made, 6, {"mac_address": MAC}))
        assert (same.code, same.reason) == (409, "address_taken")
        assert paths(same) == [f"{NIC}.mac_address"]
        assert await made.stored(uid(6)) is None
        await vm(made, 7)  # its MAC is chosen
        await made.ask("delete", uid=first.uid)
        await made.say(status(first, VmState.DELETING, released=True))
        await settle()
        assert await claimed(made) == set()
        assert (await static(made, 6, {"mac_address": MAC})).uid == uid(6)
