"""The API of networks as a client sees it: a real controller over the fake bus."""

import asyncio
import json
from ipaddress import IPv4Network
from typing import Any

import pytest
from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_owners import Asking
from services.controller.tests.test_unreadable import damage
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world

from virtbus.bus.client.ports import EntryKind
from virtbus.bus.provisioning import permissions
from virtbus.controller.core.quotas import Quota
from virtbus.controller.edge.network_api import NetworkLimits
from virtbus.controller.edge.network_removals import WAIT_S
from virtbus.schemas import subjects
from virtbus.schemas.names import NameAsk
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.network_api import NetworkObjectView
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, validate

SPEC = {"kind": "nat", "subnet": "10.200.0.0/24"}
MAC = "02:00:00:00:00:01"
BLUE = subjects.network_record("default", "blue")


async def make(made: World, name: str = "blue", number: int = 1, **more: Any) -> NetworkObjectView:
    asked = {"name": name, "uid": uid(number), "spec": SPEC} | more
    return validate(NetworkObjectView, (await made.ask("create", "network", **asked))["network"])


async def of(made: World, verb: str, **data: Any) -> NetworkObjectView:
    return validate(NetworkObjectView, await made.ask(verb, "network", **{"name": "blue", **data}))


async def vm(made: World, number: int = 7, network: str = "blue", **more: Any) -> VmRecord:
    asked = {"name": f"vm-{number}", "image": "tiny", "network": network, "uid": uid(number)}
    await made.ask("create", **(asked | more))
    stored = await made.stored(uid(number))
    assert stored is not None
    return stored


async def kinds(made: World, number: int = 1) -> list[str]:
    found = await made.client.history(subjects.events(uid(number)))
    return [message.subject.split(".", 4)[4] for message in found]


def paths(error: Any) -> list[str]:
    return [detail.path for detail in error.body.details]


# --- create -------------------------------------------------------------------------------
@played()
async def test_a_network_is_made_shown_listed_and_told(made: World) -> None:
    view = await make(made, labels={"tier": "db"})
    assert (view.uid, view.state, view.spec.subnet) == (uid(1), "Ready", "10.200.0.0/24")
    assert await of(made, "get") == view
    again = await made.ask("create", "network", name="blue", uid=uid(1), spec=SPEC)
    assert not again.get("created", False)
    await make(made, "red", 2, namespace="_", spec={"kind": "isolated", "subnet": "10.9.0.0/24"})
    listed = await made.ask("list", "network")
    assert [one["name"] for one in listed["items"]] == ["red", "blue"]
    listed = await made.ask("list", "network", labels={"tier": "db"})
    assert [one["name"] for one in listed["items"]] == ["blue"]
    assert await kinds(made) == ["network.created"]


@played()
async def test_names_and_uids_have_one_network(made: World) -> None:
    await make(made)
    assert (await refused(make(made, number=2))).reason == "name_taken"
    other = await refused(make(made, spec=SPEC | {"subnet": "10.201.0.0/24"}))
    assert (other.reason, paths(other)) == ("uid_taken", ["spec.subnet"])


@played()
async def test_bad_fields_are_refused_with_their_paths(made: World) -> None:
    wrong = {
        "spec.kind": {"kind": "switch"},
        "spec.link": {"kind": "bridge"},
        "spec.vlan": SPEC | {"vlan": 7},
        "spec.mode": {"kind": "bridge", "link": "br-lan", "mode": "vepa"},
        "spec.subnet": {"kind": "nat"},
        "spec.subnets": {"kind": "routed"},
        "spec.conflist": {"kind": "cni"},
        "spec.gateway": SPEC | {"gateway": "10.9.0.1"},
        "spec.mtu": SPEC | {"mtu": 65_522},
        "spec.subnets.n2": {
            "kind": "routed",
            "subnets": {"n1": "10.1.0.0/16", "n2": "10.1.2.0/24"},
        },
        "spec.config": {"kind": "cni", "config": "{}"},
    }
    for path, spec in wrong.items():
        error = await refused(make(made, spec=spec))
        assert (error.code, paths(error)) == (400, [path]), spec
    public = await refused(make(made, spec=SPEC | {"subnet": "8.8.8.0/24"}))
    assert (public.code, paths(public)) == (400, ["spec.subnet"])
    assert paths(await refused(make(made, "default"))) == ["name"]
    assert await made.client.get(BLUE) is None


@played()
async def test_a_link_that_no_node_has_and_allows_is_refused(made: World) -> None:
    await made.hear(node("n1", links={"br-lan": "bridge", "eth1": "macvtap"}))
    for link in ("br-wan", "eth1"):
        error = await refused(make(made, spec={"kind": "bridge", "link": link}))
        assert (error.reason, paths(error)) == ("network_impossible", ["spec.link"])
        assert "links_allowed" in str(error)


@played()
async def test_a_vm_goes_to_a_node_that_has_the_link_of_its_network(made: World) -> None:
    await made.hear(node("n1"))
    await made.hear(node("n2", links={"br-lan": "bridge"}))
    await make(made, spec={"kind": "bridge", "link": "br-lan"})
    for number in (7, 8, 9):
        stored = await vm(made, number)
        assert stored.node == "n2"
    await made.hear(node("n2"))
    full = await refused(vm(made, 10))
    assert any("has or allows no bridge br-lan" in one.message for one in full.body.details)


@played()
async def test_overlapping_subnets_are_refused_before_anything_is_made(made: World) -> None:
    await made.hear(node("n1", guest_subnet="10.127.0.0/16", addresses=("10.50.0.7",)))
    await make(made)
    taken = {
        "10.200.0.128/25": "the network default/blue",
        "10.127.8.0/24": "the network default of n1",
        "10.50.0.0/16": "the address 10.50.0.7 of n1",
    }
    for subnet, who in taken.items():
        error = await refused(make(made, "red", 2, spec=SPEC | {"subnet": subnet}))
        assert (error.reason, who in str(error)) == ("subnet_taken", True), str(error)
    isolated = await make(made, "red", 2, spec={"kind": "isolated", "subnet": "10.200.0.0/24"})
    assert isolated.state == "Ready"  # no host has a route to it


@played(nodes=2)
async def test_a_network_that_no_node_could_have_is_refused(made: World) -> None:
    await made.hear(node("n1", networks=("default", "lan"), cni_plugins=("ptp",)))
    routed = {"kind": "routed", "subnets": {"n9": "10.1.0.0/24"}}
    assert paths(await refused(make(made, spec=routed))) == ["spec.subnets.n9"]
    unknown = await refused(make(made, spec={"kind": "cni", "conflist": "wan"}))
    assert (unknown.reason, paths(unknown)) == ("network_impossible", ["spec.conflist"])
    plugins = [{"type": "ptp", "ipam": {"type": "host-local"}}]
    config = json.dumps({"cniVersion": "1.0.0", "plugins": plugins})
    forbidden = await refused(make(made, spec={"kind": "cni", "config": config}))
    assert paths(forbidden) == ["spec.config.plugins[0].ipam.type"]
    assert "cni_plugins_allowed" in str(forbidden)
    await made.hear(node("n2", cni_plugins=("host-local",)))
    divided = await refused(make(made, spec={"kind": "cni", "config": config}))
    assert "no node allows all plugins; n1 does not allow host-local" in str(divided)
    await make(made, spec={"kind": "cni", "conflist": "lan"})


@played()
async def test_only_admins_take_subnets_of_hosts_and_make_networks_of_all(made: World) -> None:
    client = Asking(made, "CLIENT")

    async def ask(spec: Any, namespace: str = "default") -> Any:
        asked = {"name": "blue", "namespace": namespace, "spec": spec}
        return await client.bus.request(subjects.api("network", "create"), asked, timeout_s=10)

    isolated = {"kind": "isolated", "subnet": "10.9.0.0/24"}
    config = {"kind": "cni", "config": json.dumps({"plugins": [{"type": "ptp"}]})}
    link = {"kind": "bridge", "link": "br-lan"}
    wanted = ((SPEC, "default"), (config, "default"), (link, "default"), (isolated, "_"))
    for spec, namespace in wanted:
        assert (await refused(ask(spec, namespace))).reason == "admin_only"
    api = made.controllers["c1"]._networks
    api._limits = NetworkLimits(Quota(100, 100), (IPv4Network("10.200.0.0/16"),))
    assert (await ask(SPEC))["created"]


@played()
async def test_the_name_servers_of_a_network_can_be_removed(made: World) -> None:
    await make(made, spec=SPEC | {"dns": ["192.0.2.53"]})
    assert (await of(made, "update", protected=True)).spec.dns == ("192.0.2.53",)
    assert (await of(made, "update", dns=[])).spec.dns == ()


@played()
async def test_a_full_quota_refuses_further_networks(made: World) -> None:
    made.controllers["c1"]._networks._limits = NetworkLimits(Quota(1, 2))
    await make(made)
    other = {"kind": "isolated", "subnet": "10.9.0.0/24"}
    assert (await refused(make(made, "red", 2, spec=other))).reason == "network_quota"


# --- use ----------------------------------------------------------------------------------
@played()
async def test_a_vm_keeps_the_network_of_its_create(made: World) -> None:
    await make(made, namespace="_")
    assert (await vm(made, 6)).network_targets["blue"].uid == uid(1)
    await make(made, number=2, spec={"kind": "isolated", "subnet": "10.9.0.0/24"})
    own = (await vm(made, 7)).network_targets["blue"]
    assert (own.uid, own.spec.kind) == (uid(2), "isolated")  # its namespace's own comes first
    await of(made, "update", mtu=1400, dns=["192.0.2.53"])
    assert (await vm(made, 8)).network_targets["blue"].spec.mtu == 1400
    stored = await made.stored(uid(7))
    assert stored is not None
    assert stored.network_targets["blue"] == own


@played()
async def test_an_unknown_network_is_refused_with_its_field(made: World) -> None:
    error = await refused(vm(made, network="green"))
    assert (error.code, error.reason) == (404, "network_unknown")
    assert paths(error) == ["spec.networks[0].network"]
    await make(made, namespace="shop")
    assert (await refused(vm(made))).reason == "network_unknown"  # of another namespace


@played(nodes=0)
async def test_a_network_that_may_be_on_an_unheard_node_is_asked_for_again(made: World) -> None:
    error = await refused(vm(made, network="lan"))
    assert (error.code, error.reason) == (503, "networks_unheard")
    assert (await vm(made, network="default")).node == "_"


@played(nodes=3)
async def test_a_vm_of_a_routed_network_goes_to_a_node_with_a_subnet(made: World) -> None:
    subnets = {"n2": "10.1.0.0/24", "n3": "10.2.0.0/24"}
    await made.hear(node("n2", addresses=("192.0.2.7", "2001:db8::7")))
    view = await make(made, spec={"kind": "routed", "subnets": subnets})
    routes = [(one.destination, one.node, one.via) for one in view.routes]
    assert routes == [("10.1.0.0/24", "n2", ("192.0.2.7",)), ("10.2.0.0/24", "n3", ())]
    placed = {(await vm(made, number)).node for number in range(6, 12)}
    assert placed == {"n2", "n3"}


@played()
async def test_only_nodes_that_offer_passt_take_a_vm_behind_it(made: World) -> None:
    spec = {
        "domain": {"devices": {"interfaces": [{"name": "default", "binding": "passt"}]}},
        "networks": [{"name": "default"}],
    }
    asked: dict[str, Any] = {"name": "web", "image": "tiny", "uid": uid(7), "spec": spec}
    await made.hear(node("n1"))
    await settle()
    error = await refused(made.ask("create", **asked))
    assert "install Debian's package passt there" in str(error.body.details)
    await made.hear(node("n2", bindings=("passt",)))
    await settle()
    await made.ask("create", **asked)
    stored = await made.stored(uid(7))
    assert stored is not None
    assert stored.node == "n2"


@played()
async def test_only_nodes_that_allow_the_plugins_take_a_vm(made: World) -> None:
    await made.hear(node("n1", cni_plugins=("ptp",)))
    await settle()
    config = json.dumps({"cniVersion": "1.0.0", "plugins": [{"type": "ptp"}]})
    await make(made, spec={"kind": "cni", "config": config, "mtu": 1300})
    assert (await vm(made)).node == "n1"
    await of(made, "update", mtu=1400, dns=["192.0.2.53"])
    changed = (await vm(made, 9)).network_targets["blue"].spec
    assert (changed.mtu, changed.dns) == (1400, ("192.0.2.53",))
    await made.hear(node("n1"))
    await settle()
    error = await refused(vm(made, 8))
    assert "does not allow the CNI plugin ptp" in str(error.body.details)


@played()
async def test_names_do_not_lead_to_addresses_that_each_host_has(made: World) -> None:
    await make(made)
    stored = await vm(made)
    nics = [
        InterfaceStatus(name="a", network=network, mac=MAC, addresses=(address,))
        for network, address in (("blue", "10.200.0.7/24"), ("lan", "10.88.0.7/24"))
    ]
    await made.say(status(stored, interfaces=tuple(nics)))
    await settle()
    ask = NameAsk(uid=uid(7), namespace="default", name="vm-7")
    answer = await made.host.request(subjects.names_ask("n1"), ask, timeout_s=10)
    assert answer["addresses"] == ["10.88.0.7"]


# --- delete -------------------------------------------------------------------------------
@played()
async def test_a_network_in_use_is_not_deleted_and_names_its_users(made: World) -> None:
    await make(made)
    await vm(made)
    view = await of(made, "get")
    assert (view.state, view.users, view.user_count) == ("InUse", ("default/vm-7",), 1)
    error = await refused(of(made, "delete"))
    assert (error.code, error.reason, paths(error)) == (409, "network_in_use", ["vm/default/vm-7"])


@played()
async def test_a_deleted_network_ends_after_the_longest_commit(made: World) -> None:
    await make(made)
    assert (await of(made, "delete")).state == "Deleting"
    late = await refused(vm(made))
    assert (late.reason, paths(late)) == ("deleting", ["spec.networks[0].network"])
    await asyncio.sleep(WAIT_S - 1)
    assert (await of(made, "get")).state == "Deleting"
    await asyncio.sleep(5)
    entry = await made.client.get(BLUE)
    assert entry is not None
    assert (entry.kind, entry.why) == (EntryKind.PURGE, uid(1).encode())
    assert (await refused(make(made))).code == 410
    assert await kinds(made) == ["network.created", "network.deleting", "network.deleted"]


@played()
async def test_a_delete_is_reverted_if_a_vm_was_committed_meanwhile(made: World) -> None:
    await make(made)
    entry = await made.client.get(BLUE)
    assert entry is not None
    target = (await vm(made, 6)).network_targets["blue"]
    await made.ask("delete", name="vm-6")
    await made.host.purge(subjects.vm_record("n1", uid(6)), why=b"deleted")
    await settle()
    await of(made, "delete")
    slow = record(7, "slow", network_targets={"blue": target})  # of a controller that stood still
    await made.host.put(subjects.vm_record("n1", uid(7)), encode(slow))
    await asyncio.sleep(WAIT_S + 5)
    view = await of(made, "get")
    assert (view.state, view.users) == ("InUse", ("default/slow",))
    assert "default/slow use it" in view.message
    assert (await kinds(made))[-1] == "network.kept"


@pytest.mark.parametrize("ended", [False, True])
def test_a_create_reverts_a_delete_that_began_meanwhile_unless_it_ended(*, ended: bool) -> None:
    async def body() -> None:
        async with world() as made:
            await make(made)
            creates = made.controllers["c1"]._vms._creates
            commit, writes = creates._commit, creates._networks._writes

            async def late(*arguments: Any) -> Any:
                held = await writes.latest("default", "blue")
                assert held is not None
                marked = held.record.model_copy(update={"deleting": True})
                held = await writes.replace(held, marked)
                if ended:
                    await writes.end(held)
                return await commit(*arguments)

            creates._commit = late  # type: ignore[assignment,method-assign]  # at the worst moment
            if ended:
                assert (await refused(vm(made))).reason == "deleting"
                stored = await made.stored(uid(7))
                assert stored is None or stored.deleting
                return
            assert (await vm(made)).network_targets["blue"].uid == uid(1)
            await asyncio.sleep(WAIT_S + 5)
            view = await of(made, "get")
            assert (view.state, view.users) == ("InUse", ("default/vm-7",))
            assert (await kinds(made))[-1] == "network.kept"

    run(body)


async def add(made: World, network: str) -> VmRecord:
    """Add an interface on `network` to the VM 7; return its record."""
    view = await made.ask("get", uid=uid(7))
    spec = view["spec"]
    spec["networks"].append({"name": f"on-{network}", "network": network})
    spec["domain"]["devices"]["interfaces"].append({"name": f"on-{network}"})
    await made.ask("update", uid=uid(7), revision=view["revision"], spec=spec)
    stored = await made.stored(uid(7))
    assert stored is not None
    return stored


@played()
async def test_an_added_interface_gets_its_network_and_the_others_keep_theirs(made: World) -> None:
    await make(made)
    before = await vm(made)
    await of(made, "update", mtu=1400)
    await make(made, "red", 2, spec={"kind": "isolated", "subnet": "10.9.0.0/24"})
    after = await add(made, "red")
    assert after.network_targets["red"].uid == uid(2)
    assert after.network_targets["blue"] == before.network_targets["blue"]
    error = await refused(add(made, "green"))
    assert (error.reason, paths(error)) == ("network_unknown", ["spec.networks[2].network"])


@pytest.mark.parametrize("ended", [False, True])
def test_an_update_reverts_a_delete_that_began_meanwhile_unless_it_ended(*, ended: bool) -> None:
    async def body() -> None:
        async with world() as made:
            before = await vm(made, network="default")
            await make(made)
            vms = made.controllers["c1"]._vms
            commit, writes = vms._commits.replace, vms._networks._writes

            async def late(*arguments: Any) -> Any:
                vms._commits.replace = commit  # type: ignore[method-assign]
                held = await writes.latest("default", "blue")
                assert held is not None
                marked = held.record.model_copy(update={"deleting": True})
                held = await writes.replace(held, marked)
                if ended:
                    await writes.end(held)
                return await commit(*arguments)

            vms._commits.replace = late  # type: ignore[assignment,method-assign]  # at the worst moment
            if ended:
                assert (await refused(add(made, "blue"))).reason == "deleting"
                stored = await made.stored(uid(7))
                assert stored is not None
                assert stored.spec == before.spec
                return
            assert (await add(made, "blue")).network_targets["blue"].uid == uid(1)
            assert (await kinds(made))[-1] == "network.kept"

    run(body)


@played()
async def test_a_protected_network_stays_until_its_protection_is_cleared(made: World) -> None:
    await make(made, spec=SPEC | {"protected": True})
    error = await refused(of(made, "delete"))
    assert (error.code, error.reason) == (409, "protected")
    await of(made, "update", protected=False)
    assert (await of(made, "delete")).state == "Deleting"


@played()
async def test_an_unreadable_network_is_deleted_by_name(made: World) -> None:
    await make(made)
    damage(made.server, BLUE, b"\xc1")
    await settle()
    assert (await refused(of(made, "get"))).reason == "unreadable"
    assert (await of(made, "delete")).state == "Deleting"
    await asyncio.sleep(WAIT_S + 5)
    assert (await refused(of(made, "get"))).reason == "network_not_found"


@played()
async def test_a_lost_network_comes_back_with_its_vm(made: World) -> None:
    await make(made)
    kept = await vm(made)
    await made.host.purge(BLUE)
    await settle()
    rebuilds = made.controllers["c1"]._rebuilds
    await rebuilds._networks.restore(kept)
    view = await of(made, "get")
    assert (view.uid, view.spec.subnet, view.users) == (uid(1), SPEC["subnet"], ("default/vm-7",))


def test_people_change_networks_observers_read_them_and_bridges_see_none() -> None:
    verbs = ("create", "get", "list", "offers", "update", "delete")
    every = {verb: subjects.api("network", verb) for verb in verbs}
    allowed = {
        role.user: {verb for verb, subject in every.items() if subject in role.publish}
        for role in (permissions.client(), permissions.observer(), permissions.bridge())
    }
    reads = {"get", "list", "offers"}
    assert allowed == {"client": set(verbs), "observer": reads, "bridge": set()}
