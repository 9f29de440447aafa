"""Security groups as a client and a node see them: real controllers over the fake bus."""

import asyncio
import math
from typing import Any

import pytest
from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_network_api import kinds, paths
from services.controller.tests.test_owners import Asking
from services.controller.tests.test_unreadable import damage
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world_on

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.client.stored_sizes import check_written
from virtbus.bus.errors import OversizeError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.security_groups import Membership
from virtbus.controller.core.vm_keys import Stored, StoredVm
from virtbus.controller.edge.group_keys import KEPT_S, GroupKeys, NodeGroups
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.schemas import subjects
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.network_object import NetworkSpec, NetworkTarget
from virtbus.schemas.records import read_node_group
from virtbus.schemas.security_group import GroupSpec, NodeGroup, SecurityGroupRecord
from virtbus.schemas.security_group_api import SecurityGroupView
from virtbus.schemas.vm import Network
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import encode, validate

WEB = {"app": "web"}
SPEC = {
    "selector": {"labels": WEB},
    "rules": [{"direction": "ingress", "protocol": "tcp", "ports": ["80"], "groups": ["lb"]}],
}
LB = {"selector": {"labels": {"app": "lb"}}}


async def make(made: World, name: str = "web", number: int = 1, **more: Any) -> SecurityGroupView:
    asked = {"name": name, "uid": uid(number), "spec": SPEC} | more
    answer = await made.ask("create", "security-group", **asked)
    return validate(SecurityGroupView, answer["group"])


async def of(made: World, verb: str, **data: Any) -> SecurityGroupView:
    answer = await made.ask(verb, "security-group", **{"name": "web", **data})
    return validate(SecurityGroupView, answer)


async def vm(made: World, number: int, **more: Any) -> None:
    asked = {"name": f"vm-{number}", "image": "tiny", "uid": uid(number)}
    await made.ask("create", **(asked | more))


async def has(made: World, number: int, *addresses: str, network: str = "default") -> None:
    """Report the addresses of a VM, as its node does."""
    record = await made.stored(uid(number))
    assert record is not None
    nic = InterfaceStatus(name="default", network=network, mac="02::", addresses=addresses)
    await made.say(status(record, interfaces=(nic,)))


async def on_node(made: World, name: str = "n1", group: str = "web") -> NodeGroup | None:
    """Return a group as the node has it, after the leader had time."""
    await asyncio.sleep(1)
    entry = await made.host.get(subjects.node_group(name, "default", group))
    if entry is None or entry.kind is not EntryKind.PUT:
        return None
    return read_node_group(entry.key, entry.value)


async def ask_as(who: Asking, verb: str, **data: Any) -> Any:
    return await who.bus.request(subjects.api("security-group", verb), data, timeout_s=10)


# --- the object ---------------------------------------------------------------------------
@played()
async def test_a_group_is_made_shown_listed_changed_and_ended(made: World) -> None:
    await vm(made, 7, labels=WEB)
    view = await make(made, labels={"tier": "x"})
    assert (view.members, view.isolates) == (("vm-7",), ("ingress",))
    assert view.message == "no group has the name lb"
    assert await of(made, "get") == view
    again = await made.ask("create", "security-group", name="web", uid=uid(1), spec=SPEC)
    assert not again.get("created", False)
    await make(made, "lb", 2, spec=LB)
    listed = await made.ask("list", "security-group")
    assert [one["name"] for one in listed["items"]] == ["lb", "web"]
    listed = await made.ask("list", "security-group", labels={"tier": "x"})
    assert [one["name"] for one in listed["items"]] == ["web"]
    changed = await of(made, "update", spec=LB | {"isolates": ["egress"]}, revision=view.revision)
    assert (changed.generation, changed.isolates, changed.members) == (2, ("egress",), ())
    stale = await refused(of(made, "update", spec=LB, revision=view.revision))
    assert (stale.code, stale.reason) == (409, "stale_revision")
    await of(made, "delete")
    assert (await refused(of(made, "get"))).reason == "security_group_not_found"
    assert (await refused(make(made))).code == 410
    assert await kinds(made) == [
        "security-group.created",
        "security-group.updated",
        "security-group.deleted",
    ]


@played()
async def test_all_problems_of_a_spec_are_in_one_answer_with_their_paths(made: World) -> None:
    rule = {"direction": "ingress"}
    wrong = {
        "selector": {
            "expressions": [
                {"key": "app", "operator": "In"},
                {"key": "app", "operator": "Exists", "values": ["x"]},
            ]
        },
        "rules": [
            {"direction": "sideways"},
            rule | {"protocol": "icmp", "ports": ["80"]},
            rule | {"protocol": "tcp", "ports": ["0", "90-80", "http"]},
            rule | {"cidrs": ["10.0.0.1/8", "fd00::1/64", "::ffff:10.0.0.0/104", "x"]},
            rule | {"groups": ["A_b"]},
        ],
        "isolates": ["up"],
    }
    error = await refused(make(made, spec=wrong))
    assert error.code == 400
    assert sorted(paths(error)) == sorted(
        [
            "spec.selector.expressions[0].values",
            "spec.selector.expressions[1].values",
            "spec.rules[0].direction",
            "spec.rules[1].ports",
            *(f"spec.rules[2].ports[{index}]" for index in range(3)),
            *(f"spec.rules[3].cidrs[{index}]" for index in range(4)),
            "spec.rules[4].groups[0]",
            "spec.isolates[0]",
        ]
    )
    many = rule | {"cidrs": [f"10.{index}.0.0/16" for index in range(64)]}
    error = await refused(make(made, spec=SPEC | {"rules": [many] * 20}))
    assert paths(error) == ["spec.rules"]


@played()
async def test_quotas_bound_the_groups_of_a_namespace(made: World) -> None:
    made.controllers["c1"]._groups._quota = Quota(1, 2)
    await make(made)
    assert (await refused(make(made, "lb", 2))).reason == "security_group_quota"
    await make(made, "lb", 2, namespace="shop")
    assert (await refused(make(made, "lb", 3, namespace="x"))).reason == "security_group_quota"
    await made.ask("create", "security-group", name="web", uid=uid(1), spec=SPEC)


@played()
async def test_a_bridge_has_its_own_groups_and_they_select_its_own_vms(made: World) -> None:
    await vm(made, 7, labels=WEB)
    bridge = Asking(made, "BRIDGE")
    await bridge.ask("create", name="vm-8", image="tiny", uid=uid(8), labels=WEB)
    await ask_as(bridge, "create", name="web", uid=uid(1), spec=SPEC)
    assert (await of(made, "get")).members == ("vm-8",)
    await make(made, "lb", 2)
    for verb in ("get", "update", "delete"):
        error = await refused(ask_as(bridge, verb, name="lb"))
        assert (error.code, error.reason) == (403, "not_owner")
    listed = await ask_as(bridge, "list")
    assert [one["name"] for one in listed["items"]] == ["web"]


@played()
async def test_an_unreadable_group_can_be_deleted(made: World) -> None:
    await make(made)
    damage(made.server, subjects.security_group("default", "web"), b"rubbish")
    assert (await refused(of(made, "get"))).reason == "unreadable"
    await of(made, "delete")
    assert (await refused(of(made, "get"))).code == 404


# --- the nodes ----------------------------------------------------------------------------
@played(nodes=2)
async def test_a_node_gets_the_groups_of_its_vms_with_the_addresses_of_peers(made: World) -> None:
    await make(made)
    await make(made, "lb", 2, spec=LB)
    await vm(made, 7, labels=WEB)
    record = await made.stored(uid(7))
    assert record is not None
    here, other = record.node, {"n1": "n2", "n2": "n1"}[record.node]
    found = await on_node(made, here)
    assert found is not None
    assert (found.uid, found.spec.peers, found.peers) == (uid(1), ("lb",), {"lb": {}})
    assert await on_node(made, other) is None
    for number in (8, 9):
        await vm(made, number, labels={"app": "lb"})
        await has(made, number, f"10.127.0.{number}/16", f"fd00::{number}/64")
    near = [n for n in (8, 9) if (await made.stored(uid(n))).node == here]  # type: ignore[union-attr]
    found = await on_node(made, here)
    assert found is not None
    # the built-in network has the same subnet on each host
    wanted = sorted(one for n in near for one in (f"10.127.0.{n}", f"fd00::{n}"))
    assert found.addresses("lb", "default") == tuple(wanted)
    assert found.addresses("lb", "blue") == ()
    await of(made, "update", spec=SPEC | {"rules": []})
    found = await on_node(made, here)
    assert found is not None
    assert (found.generation, found.peers) == (2, {})
    await of(made, "delete")
    assert await on_node(made, here) is None


@played()
async def test_a_record_and_the_groups_that_its_node_lacks_are_one_batch(made: World) -> None:
    await make(made)
    await vm(made, 7, labels=WEB)
    key = subjects.node_group("n1", "default", "web")
    group, record = await made.host.get(key), await made.host.get(subjects.vm_anywhere(uid(7)))
    assert group is not None
    assert record is not None
    assert group.revision == record.revision - 1
    await vm(made, 8, labels=WEB)
    again = await made.host.get(key)
    assert again is not None
    assert again.revision == group.revision  # it was there
    # a new label has its group at once, too
    await make(made, "db", 3, spec={"selector": {"labels": {"app": "db"}}})
    seen = await made.vm("get", name="vm-8")
    await made.ask("update", name="vm-8", revision=seen.revision, labels={"app": "db"})
    assert await made.host.get(subjects.node_group("n1", "default", "db")) is not None


@played()
async def test_a_key_of_a_node_stays_a_while_after_the_last_member(made: World) -> None:
    await make(made)
    await vm(made, 7, labels=WEB)
    seen = await made.vm("get", name="vm-7")
    await made.ask("update", name="vm-7", revision=seen.revision, labels={})
    assert await on_node(made) is not None
    await asyncio.sleep(KEPT_S + 40)
    assert await on_node(made) is None


@played()
async def test_a_group_that_selects_other_vms_leaves_its_former_ones_at_once(made: World) -> None:
    await make(made)
    await vm(made, 7, labels=WEB)
    assert await on_node(made) is not None
    await of(made, "update", spec=SPEC | {"selector": {"labels": {"app": "db"}}})
    there = await on_node(made)
    assert there is not None
    assert there.spec.selector.labels == {"app": "db"}


@played()
async def test_a_key_without_a_member_is_written_again_with_the_next_one(made: World) -> None:
    """The leader may purge it at this moment: one of the two writes conflicts."""
    await make(made)
    await vm(made, 7, labels=WEB)
    seen = await made.vm("get", name="vm-7")
    await made.ask("update", name="vm-7", revision=seen.revision, labels={})
    await asyncio.sleep(1)
    key = subjects.node_group("n1", "default", "web")
    before = await made.host.get(key)
    await vm(made, 8, labels=WEB)
    group, record = await made.host.get(key), await made.host.get(subjects.vm_anywhere(uid(8)))
    assert before is not None
    assert group is not None
    assert record is not None
    assert group.revision == record.revision - 1 > before.revision
    # a further write of the member needs none
    seen = await made.vm("get", name="vm-8")
    await made.ask("update", name="vm-8", revision=seen.revision, labels=WEB | {"x": "y"})
    again = await made.host.get(key)
    assert again is not None
    assert again.revision == group.revision


@played(controllers=2)
async def test_an_unchanged_fleet_costs_no_writes(made: World) -> None:
    await make(made)
    await make(made, "lb", 2, spec=LB)
    await vm(made, 7, labels=WEB)
    await on_node(made)
    before = await made.host.get(subjects.node_group("n1", "default", "web"))
    await made.hear(node("n1"))
    await has(made, 7, "10.127.0.7/16")  # no rule names its group
    await settle()
    await on_node(made)
    after = await made.host.get(subjects.node_group("n1", "default", "web"))
    assert before is not None
    assert after is not None
    assert after.revision == before.revision


@pytest.mark.parametrize("what", ["group", "record"])
def test_a_fresh_leader_keeps_the_keys_of_what_it_cannot_read(what: str) -> None:
    server = MemoryServer()

    async def body() -> None:
        async with world_on(server, controllers=1, nodes=1) as made:
            await make(made)
            await vm(made, 7, labels=WEB)
            assert await on_node(made) is not None
        group, record = subjects.security_group("default", "web"), subjects.vm_record("n1", uid(7))
        key = {"group": group, "record": record}[what]
        good = server.shelf(key).last(key)
        assert good is not None
        damage(server, key, encode({"schema_version": 99, "uid": uid(1)}))
        async with world_on(server, controllers=1, nodes=1) as made:
            await asyncio.sleep(2 * KEPT_S)
            assert await on_node(made) is not None
            damage(server, key, good.value)
            seen = await made.vm("get", name="vm-7")
            await made.ask("update", name="vm-7", revision=seen.revision, labels={})
            await asyncio.sleep(KEPT_S + 40)
            assert await on_node(made) is None

    run(body)


def test_a_key_that_is_older_than_its_group_is_written_with_the_next_record() -> None:
    """The leader follows a changed group a moment later: a new VM must not start before that."""
    fleet, bus = Fleet(), MemoryBus(MemoryServer())
    fleet.apply(StoredVm(record(7, node="n1", labels=WEB), 1))
    group = named(1)
    new = record(8, node="n1", labels=WEB)

    async def body() -> None:
        fleet.groups.apply(Stored(group, 2))
        assert await NodeGroups(bus, fleet)._round(LeaderTerm("fleet", 1, math.inf))
        assert await GroupKeys(bus, fleet).writes(new) == []
        fleet.groups.apply(Stored(group.model_copy(update={"generation": 2}), 3))
        (write,) = await GroupKeys(bus, fleet).writes(new)
        there = await bus.get(write.key)
        assert there is not None
        assert write.expect == there.revision
        assert write.value is not None
        assert read_node_group(write.key, write.value).generation == 2

    run(body)


# --- large fleets -------------------------------------------------------------------------
class Counted(dict[tuple[str, str], tuple[VmStatus, int]]):
    """Statuses that count how often one is read."""

    reads = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


def named(number: int, *peers: str) -> SecurityGroupRecord:
    """Return a group of all VMs that names these groups."""
    rules = [{"direction": "ingress", "groups": peers[at : at + 16]} for at in range(0, 32, 16)]
    spec = validate(GroupSpec, {"selector": {}, "rules": rules})
    name = f"g{number}"
    return SecurityGroupRecord(
        uid=uid(number), namespace="default", name=name, spec=spec, created_ns=1
    )


def many() -> tuple[Fleet, Counted]:
    """Return 32 groups that name each other, and 40 VMs on 4 nodes."""
    fleet, names = Fleet(), [f"g{number}" for number in range(1, 33)]
    for number in range(1, 33):
        fleet.groups.apply(Stored(named(number, *names), number))
    statuses = Counted()
    for number in range(100, 140):
        one = record(number, node=f"n{number % 4 + 1}", labels=WEB)
        fleet.apply(StoredVm(one, number))
        nic = InterfaceStatus(name="default", mac="02::", addresses=(f"10.127.0.{number}/16",))
        statuses[one.node, one.uid] = (status(one, interfaces=(nic,)), 1)
    fleet.statuses = statuses
    return fleet, statuses


def test_the_addresses_of_a_vm_are_read_once_for_all_groups_and_nodes() -> None:
    fleet, statuses = many()
    found = dict(Membership(fleet.vms.values(), statuses, fleet.groups).wanted())
    assert len(found) == 4 * 32
    for node_name in ("n1", "n4"):
        value = found[subjects.node_group(node_name, "default", "g32")]
        assert value.peers.keys() == {f"g{number}" for number in range(1, 33)}
        there = {
            vm.uid for vm in (held.record for held in fleet.vms.values()) if vm.node == node_name
        }
        assert len(value.addresses("g7", "default")) == len(there) == 10
    assert statuses.reads == 40


@pytest.mark.parametrize(
    ("spec", "far"),
    [
        (None, False),
        ({"kind": "cni", "conflist": "pods"}, False),
        ({"kind": "nat", "subnet": "10.9.0.0/16"}, False),
        ({"kind": "nat", "subnet": "10.9.0.0/16", "pool": "fleet"}, True),
        ({"kind": "bridge", "link": "br0"}, True),
    ],
)
def test_members_on_other_hosts_count_if_no_other_guest_has_their_addresses(
    spec: dict[str, Any] | None, far: bool
) -> None:
    fleet = Fleet()
    fleet.groups.apply(Stored(named(1, "g1"), 1))
    for number in (101, 102):
        one = record(number, node=f"n{number - 100}", labels=WEB)
        update: dict[str, Any] = {
            "spec": one.spec.model_copy(
                update={"networks": (Network(name="default", network="blue"),)}
            )
        }
        if spec is not None:
            target = NetworkTarget(
                uid=uid(900), namespace="default", name="blue", spec=validate(NetworkSpec, spec)
            )
            update["network_targets"] = {"blue": target}
        one = one.model_copy(update=update)
        fleet.apply(StoredVm(one, number))
        nic = InterfaceStatus(
            name="default", network="blue", mac="02::", addresses=(f"10.9.0.{number}/16",)
        )
        fleet.statuses[one.node, one.uid] = (status(one, interfaces=(nic,)), 1)
    value = Membership(fleet.vms.values(), fleet.statuses, fleet.groups).on_node(
        fleet.groups.listed(None)[0].record, "n1"
    )
    there = value.addresses("g1", "blue" if spec is None else uid(900))
    assert there == (("10.9.0.101", "10.9.0.102") if far else ("10.9.0.101",))


def test_a_status_adds_addresses_only_in_the_networks_of_the_record() -> None:
    fleet, statuses = many()
    networks = ("*", "x" * 30_000, "blue")
    for key, (one, _) in list(statuses.items()):
        false = tuple(
            InterfaceStatus(name=f"n{at}", network=name, mac="02::", addresses=("192.0.2.1/32",))
            for at, name in enumerate(networks)
        )
        long = InterfaceStatus(name="default", mac="02::", addresses=("\U0001f600" * 40,))
        update = {"interfaces": (*one.interfaces, *false, long)}
        statuses[key] = (one.model_copy(update=update), 2)
    found = dict(Membership(fleet.vms.values(), statuses, fleet.groups).wanted())
    for value in found.values():
        for places in value.peers.values():
            assert places.keys() == {"default"}
            assert all(one.startswith("10.127.0.") for one in places["default"])


def test_a_value_with_as_many_places_and_addresses_as_possible_can_be_written() -> None:
    fleet, _ = many()
    for number in range(1000, 1400):
        names = [f"{'x' * 50}-{number}-{at}" for at in range(16)]
        nics = tuple(Network(name=f"nic{at}", network=name) for at, name in enumerate(names))
        one = record(number, node="n1", labels=WEB)
        spec = one.spec.model_copy(update={"networks": nics})
        fleet.apply(StoredVm(one.model_copy(update={"spec": spec}), number))
        seen = tuple(
            InterfaceStatus(name="nic", network=name, mac="02::", addresses=(f"{'f' * 46}{at}",))
            for at, name in enumerate(names[:9])
        )
        fleet.statuses[one.node, one.uid] = (status(one, interfaces=seen), 1)
    found = dict(Membership(fleet.vms.values(), fleet.statuses, fleet.groups).wanted())
    for key, value in found.items():
        check_written(key, encode(value))


def test_a_value_that_is_too_large_delays_no_other_one() -> None:
    fleet, _ = many()
    refused_key = subjects.node_group("n1", "default", "g1")
    written = set()

    class Full(MemoryBus):
        async def put(self, key: str, value: bytes, **more: Any) -> int:
            if key == refused_key:
                raise OversizeError(key)
            written.add(key)
            return await super().put(key, value, **more)

    async def body() -> None:
        assert await NodeGroups(Full(MemoryServer()), fleet)._round(
            LeaderTerm("fleet", 1, math.inf)
        )

    run(body)
    assert len(written) == 4 * 32 - 1


def test_other_tasks_run_between_the_values_of_a_round() -> None:
    fleet, _ = many()
    turns = 0

    async def body() -> None:
        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        term = LeaderTerm("fleet", 1, math.inf)
        bus = MemoryBus(MemoryServer())
        assert await NodeGroups(bus, fleet)._round(term)  # now the bus has all values
        async with background() as tasks:
            tasks.start(others())
            assert await NodeGroups(bus, fleet)._round(term)
            assert turns >= 4 * 32

    run(body)
