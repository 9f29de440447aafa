"""NetworkPolicies become security groups; what cannot be expressed denies, and an Event says so."""

import asyncio
from typing import Any, cast

import pytest
from services.kubebridge.tests.world import NOW

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.policy import translation
from virtbus.kubebridge.core.policy.controller import DENIED, REFUSED, Policies
from virtbus.kubebridge.core.policy.model import Policy
from virtbus.kubebridge.core.policy.translation import (
    DENIED_MAX,
    PEER_GROUPS_MAX,
    POLICY_LABEL,
    Translated,
    group_name,
    groups_of,
    short,
)
from virtbus.kubebridge.core.runtime.controller import (
    BUS_GROUP,
    NETWORK_POLICY,
    GroupCall,
    Inputs,
    Key,
    RecordEvent,
    Refused,
    Requeue,
)
from virtbus.kubebridge.edge.runtime.reconciler import Reconciler
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.security_group import Direction, GroupSpec
from virtbus.schemas.security_group_api import (
    SecurityGroupCreate,
    SecurityGroupCreated,
    SecurityGroupDelete,
    SecurityGroupPage,
    SecurityGroupView,
)
from virtbus.schemas.subjects import api
from virtbus.schemas.wire import validate

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


def policy(name: str = "web", **spec: Any) -> dict[str, Any]:
    spec.setdefault("podSelector", {"matchLabels": {"app": "web"}})
    return {"metadata": {"name": name, "namespace": "shop", "uid": UID}, "spec": spec}


def translated(**spec: Any) -> Translated:
    return groups_of(read(Policy, policy(**spec)))


def own(**spec: Any) -> GroupSpec:
    return translated(**spec).groups["np-web"]


def rules(**spec: Any) -> list[dict[str, Any]]:
    shown = own(**spec).model_dump(mode="json")["rules"]
    return [{key: value for key, value in rule.items() if value} for rule in shown]


def test_a_policy_without_rules_closes_its_directions() -> None:
    assert own().isolated == {Direction.INGRESS}
    assert own(policyTypes=["Egress", "Ingress"]).isolated == set(Direction)
    assert own(podSelector={}).selector.matches({})
    # rules of a direction that the policy does not have change nothing
    assert own(policyTypes=["Ingress"], egress=[{}]).rules == ()


def test_ports_and_networks_are_those_of_the_policy() -> None:
    found = rules(
        ingress=[
            {
                "from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.128.0.0/9"]}}],
                "ports": [
                    {"port": 80},
                    {"protocol": "TCP", "port": 8000, "endPort": 8080},
                    {"protocol": "UDP"},
                ],
            },
            {},
        ]
    )
    cidrs = {"direction": "ingress", "cidrs": ["10.0.0.0/9"]}
    assert found == [
        cidrs | {"protocol": "udp"},
        cidrs | {"protocol": "tcp", "ports": ["80", "8000-8080"]},
        {"direction": "ingress", "protocol": "any"},
    ]


def test_selectors_of_peers_become_groups_that_isolate_nothing() -> None:
    pods = {
        "matchLabels": {"app": "lb", "kubevirt.io": "virt-launcher"},
        "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}],
    }
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}
    found = translated(ingress=[{"from": [{"podSelector": pods}, there]}])
    assert found.denied == ()
    web, lb, every = found.groups.values()
    assert web.rules[0].groups == tuple(list(found.groups)[1:])
    assert lb.isolated == every.isolated == frozenset()
    assert lb.selector.matches({"app": "lb"})
    assert not lb.selector.matches({"app": "lb", "tier": "x"})
    assert every.selector.matches({})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}, "other namespaces"),
        ({"ports": [{"port": "http"}]}, "have no names"),
        ({"ports": [{"protocol": "SCTP", "port": 1}]}, "SCTP"),
        ({"ports": [{"port": 0}]}, "within 1-65535"),
        ({"from": [{"ipBlock": {"cidr": "x"}}]}, "no network"),
        ({"from": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "?"}]}}]}, "np"),
    ],
)
def test_what_has_no_translation_denies_and_is_told(rule: dict[str, Any], message: str) -> None:
    found = translated(ingress=[rule])
    assert found.groups["np-web"].rules == ()
    assert found.groups["np-web"].isolated == {Direction.INGRESS}
    assert len(found.denied) == 1
    assert message in found.denied[0] or "spec.ingress[0]" in found.denied[0]


def test_all_namespaces_include_the_own_one() -> None:
    found = translated(ingress=[{"from": [{"namespaceSelector": {}}]}])
    assert len(found.groups) == 2
    assert "than its own" in found.denied[0]


def test_long_lists_are_split_at_the_limits_of_a_rule() -> None:
    blocks = [{"ipBlock": {"cidr": f"10.{n}.0.0/16"}} for n in range(100)]
    found = own(ingress=[{"from": blocks, "ports": [{"port": n} for n in range(1, 21)]}])
    assert [len(rule.cidrs) for rule in found.rules] == [64, 36, 64, 36]
    many = translated(ingress=[{"ports": [{"port": n}]} for n in range(1, 100)])
    assert len(many.groups["np-web"].rules) == 64
    assert "rules beyond 64" in many.denied[0]


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ({"cidr": "10.0.0.0/30"}, ["10.0.0.0/30"]),
        (
            {"cidr": "10.0.0.0/29", "except": ["10.0.0.6/31", "10.0.0.1/32", "10.0.0.0/31"]},
            ["10.0.0.2/31", "10.0.0.4/31"],
        ),
        ({"cidr": "10.0.0.0/30", "except": ["10.0.0.0/8"]}, None),
        ({"cidr": "10.0.0.0/30", "except": ["9.0.0.0/8", "11.0.0.0/8", "::/0"]}, ["10.0.0.0/30"]),
        (
            {"cidr": "0.0.0.0/0", "except": ["0.0.0.0/1", "255.255.255.255/32", "192.0.0.0/2"]},
            ["128.0.0.0/2"],
        ),
    ],
)
def test_exceptions_are_no_part_of_a_network(
    block: dict[str, Any], wanted: list[str] | None
) -> None:
    found = own(ingress=[{"from": [{"ipBlock": block}]}])
    assert [list(rule.cidrs) for rule in found.rules] == ([wanted] if wanted else [])


def test_a_network_with_endless_exceptions_denies() -> None:
    """They would be hundreds of thousands of networks, made in quadratic time."""
    many = [f"2001:db8:{n:x}::1/128" for n in range(20_000)]
    found = translated(ingress=[{"from": [{"ipBlock": {"cidr": "::/0", "except": many}}]}])
    assert found.groups["np-web"].rules == ()
    assert "::/0 without its exceptions is more than 1024 networks" in found.denied[0]
    same = [{"ipBlock": {"cidr": f"{n:x}::/16", "except": [f"{n:x}::1/128"]}} for n in range(5000)]
    found = translated(ingress=[{"from": same}])
    assert sum(rule.matches for rule in found.groups["np-web"].rules) <= 1024
    assert "1024 ports and peers" in found.denied[0]


def test_a_policy_makes_a_bounded_number_of_groups_and_problems() -> None:
    peers = [{"podSelector": {"matchLabels": {"app": f"a{n}"}}} for n in range(3000)]
    found = translated(ingress=[{"from": peers}])
    assert len(found.groups) == 1 + PEER_GROUPS_MAX
    assert len(found.groups["np-web"].peers) == PEER_GROUPS_MAX
    assert "from[128]: selectors of peers beyond 128" in found.denied[0]
    assert len(found.denied) <= DENIED_MAX


def test_rules_beyond_the_limits_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(model: Any, rule: Any) -> Any:
        nonlocal made
        made += 1
        return validate(model, rule)

    monkeypatch.setattr(translation, "validate", counted)
    for first in (1, 65_536):  # the latter are refused
        ports = [{"port": first + n} for n in range(2000)]
        found = translated(ingress=[{"ports": ports}] * 5)
        assert len(found.groups["np-web"].rules) <= 64
        assert "rules beyond 64" in found.denied[-1]
    assert made < 160


def test_names_are_ids_and_differ() -> None:
    names = ["web", "web.x", "web-x", "a" * 200, "a" * 201, "a" * 41]
    found = {group_name(name) for name in names} | {group_name(n, {"labels": {}}) for n in names}
    assert len(found) == 12
    assert max(map(len, found)) <= 63
    assert len({short(name) for name in names}) == 6
    assert max(len(short(name)) for name in names) <= 63


# --- the controller -----------------------------------------------------------------------
class Store(dict[str, Any]):
    def uid(self, name: str) -> str:
        return UID

    def ended(self, uid: str) -> bool:
        return False


class Groups:
    def __init__(self) -> None:
        self.current = True
        self.views: dict[str, SecurityGroupView] = {}

    def of(self, namespace: str, label: str) -> dict[str, SecurityGroupView]:
        assert namespace == "shop"
        return {n: one for n, one in self.views.items() if one.labels[POLICY_LABEL] == label}

    def apply(self, actions: list[Any]) -> list[str]:
        """Carry out calls as the bus does; return their verbs and names."""
        done = []
        for call in (one for one in actions if isinstance(one, GroupCall)):
            done.append(f"{call.verb} {call.request.name}")
            if call.verb == "delete":
                del self.views[call.request.name]
                continue
            self.views[call.request.name] = SecurityGroupView(
                uid=UID,
                namespace="shop",
                name=call.request.name,
                labels=call.request.labels or {},  # type: ignore[union-attr]
                spec=call.request.spec,  # type: ignore[union-attr]
                generation=1,
                revision=1,
                created_ns=1,
            )
        return done


class Desk:
    def __init__(self) -> None:
        self.store, self.groups = Store(), Groups()
        self.policies = Policies(self.store, self.groups, {})

    def step(self, name: str = "web", refused: Refused | None = None) -> list[Any]:
        key = Key(NETWORK_POLICY, "shop", name)
        inputs = Inputs(self.store.get(key.path), NOW, 0.0, {}, refused)
        return list(self.policies.controller().reconcile(key, inputs))


PEERS: dict[str, Any] = {"ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "lb"}}}]}]}


def test_groups_follow_their_policy_and_end_with_it() -> None:
    desk = Desk()
    desk.store["shop/web"] = policy(**PEERS)
    lb = group_name("web", {"labels": {"app": "lb"}, "expressions": []})
    assert desk.groups.apply(desk.step()) == ["create np-web", f"create {lb}"]
    assert desk.step() == []
    desk.store["shop/web"] = policy(ingress=[{}])
    assert desk.groups.apply(desk.step()) == ["update np-web", f"delete {lb}"]
    del desk.store["shop/web"]
    assert desk.groups.apply(desk.step()) == ["delete np-web"]
    assert desk.step() == []


def test_a_bridge_that_was_away_ends_the_groups_of_policies_that_are_gone() -> None:
    desk, name = Desk(), "a." * 100 + "z"
    desk.store[f"shop/{name}"] = policy(name)
    desk.groups.apply(desk.step(name))
    (key,) = desk.policies.of_group(Key(BUS_GROUP, "shop", short(name)))
    assert key.name == name
    assert desk.step(short(name)) == []
    desk.store.clear()
    (key,) = desk.policies.of_group(Key(BUS_GROUP, "shop", short(name)))
    assert key.name == short(name)
    assert desk.groups.apply(desk.step(key.name)) != []
    assert desk.groups.views == {}


def test_nothing_is_written_before_the_groups_were_listed() -> None:
    desk = Desk()
    desk.store["shop/web"] = policy()
    desk.groups.current = False
    assert desk.step() == [Requeue(1.0)]


def test_each_problem_is_one_event() -> None:
    desk = Desk()
    desk.store["shop/web"] = policy(ingress=[{"ports": [{"port": "http"}]}])
    (event,) = [one for one in desk.step() if isinstance(one, RecordEvent)]
    assert (event.reason, event.warning) == (DENIED, True)
    assert not [one for one in desk.step() if isinstance(one, RecordEvent)]
    refused = Refused(429, "security_group_quota", "there are 200 of 200")
    reasons = [one.reason for one in desk.step(refused=refused) if isinstance(one, RecordEvent)]
    assert reasons == [DENIED, REFUSED]


# --- the calls ----------------------------------------------------------------------------
class Controllers:
    """The bus' side of security groups, with one group of somebody else."""

    def __init__(self) -> None:
        self.views: dict[str, SecurityGroupView] = {}
        self.taken = {"np-taken"}
        self.asked: list[str] = []

    def endpoints(self) -> list[Endpoint]:
        handlers = {"list": self.list, "create": self.create, "delete": self.delete}
        return [
            Endpoint(f"security-group.{verb}", api("security-group", verb), handler)
            for verb, handler in handlers.items()
        ]

    async def list(self, _: Request) -> SecurityGroupPage:
        return SecurityGroupPage(items=tuple(self.views.values()))

    async def create(self, request: Request) -> SecurityGroupCreated:
        want = validate(SecurityGroupCreate, request.data)
        self.asked.append(want.name)
        if want.name in self.taken | self.views.keys():
            raise VirtbusError(Code.CONFLICT, "name_taken", "somebody has the name")
        view = SecurityGroupView(
            uid=UID,
            namespace=want.namespace,
            name=want.name,
            labels=want.labels,
            spec=want.spec,
            generation=1,
            revision=1,
            created_ns=1,
        )
        self.views[want.name] = view
        return SecurityGroupCreated(group=view, created=True)

    async def delete(self, request: Request) -> SecurityGroupView:
        return self.views.pop(validate(SecurityGroupDelete, request.data).name)


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []

    def record(self, _: Any, what: RecordEvent) -> None:
        self.events.append(what.reason)


async def test_calls_change_the_bus_and_a_name_of_somebody_else_is_told() -> None:
    server, there, recorder = MemoryServer(), Controllers(), Recorder()
    host, bus, nobody = MemoryBus(server, "host"), MemoryBus(server, "bridge"), cast("Any", None)
    async with host.serve(ServiceInfo("virtbus-controller", "1", "fake"), there.endpoints()):
        views = VmInformer(bus, "c1")
        reconciler = Reconciler(nobody, bus, views, cast("Any", recorder), asyncio.Event())
        store = reconciler.store(NETWORK_POLICY)
        controller = Policies(store, reconciler.groups, {}).controller()

        async def step(name: str) -> float:
            return await reconciler.reconcile(controller, Key(NETWORK_POLICY, "shop", name))

        store.put(policy("web"))
        assert await step("web") == 1.0  # the groups were not listed yet
        await reconciler.groups.refresh()
        await step("web")
        assert list(there.views) == ["np-web"]
        await step("web")
        assert there.asked == ["np-web"]
        # an answer that was lost: the group is found by a new list
        reconciler.groups.answered(SecurityGroupDelete(name="np-web", namespace="shop"), None)
        await step("web")
        await step("web")
        assert (there.asked, recorder.events) == (["np-web"] * 2, [])
        store.put(policy("taken"))
        for _ in range(3):
            assert 0 < await step("taken") <= 60
        assert recorder.events == [REFUSED]
        store.deleted(policy("web"))
        await step("web")
        assert there.views == {}
