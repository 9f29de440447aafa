"""NetworkPolicies of a real API server become security groups, by the rights of the bridge."""

import copy

import pytest
from tests.kubernetes.cluster import Json
from tests.kubernetes.platform import Platform, run, until
from tests.kubernetes.test_bridge import ns, vm

from virtbus.schemas.records import read_node_group
from virtbus.schemas.security_group import Direction, NodeGroup
from virtbus.schemas.subjects import node_group

__all__ = ["ns"]
pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]
POLICY: Json = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "web"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "web"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": {"app": "lb"}}}],
                "ports": [{"port": 80}, {"port": "http"}],
            }
        ],
    },
}


def labelled(name: str) -> Json:
    """A VM whose guests have the label `app: <name>`."""
    made = vm(name)
    made["spec"]["template"].setdefault("metadata", {})["labels"] = {"app": name}
    return made


def groups(platform: Platform, ns: str) -> dict[str, Json]:
    """Return the security groups of a namespace of the bus, by name."""
    page = platform.ask("list", resource="security-group", namespace=ns)
    return {one["name"]: one for one in page.get("items", ())}


def on_node(platform: Platform, ns: str, name: str) -> NodeGroup | None:
    """Return the group as the netd of its VM's node gets it."""
    node = platform.vms(ns)["web"]["node"]
    key = node_group(node, ns, name)

    async def asked() -> NodeGroup | None:
        async with platform.connected("admin") as bus:
            entry = await bus.get(key)
        return read_node_group(key, entry.value) if entry is not None and entry.value else None

    return run(asked())


def test_a_policy_becomes_rules_of_the_vms_that_it_selects(platform: Platform, ns: str) -> None:
    platform.apply(ns, labelled("web"), labelled("lb"), POLICY)
    for name in ("web", "lb"):
        platform.ready(ns, name)

    def members() -> dict[str, list[str]]:
        return {name: one.get("members", []) for name, one in groups(platform, ns).items()}

    def own() -> NodeGroup | None:
        return on_node(platform, ns, "np-web")

    until("the policy and its peers are groups", lambda: len(members()) == 2)
    until("they select their VMs", lambda: sorted(members().values()) == [["lb"], ["web"]])
    until("the node of the VM has the group", own)
    found = own()
    assert found is not None
    (rule,) = found.spec.rules
    assert (rule.direction, rule.ports) == (Direction.INGRESS, ("80",))
    assert members()[rule.groups[0]] == ["lb"]

    def reasons() -> set[str]:
        return {one["reason"] for one in platform.cluster.get("-n", ns, "events")["items"]}

    until("an Event names the port that cannot be expressed", lambda: "NotTranslated" in reasons())
    changed = copy.deepcopy(POLICY)
    changed["spec"]["ingress"] = []
    platform.apply(ns, changed)

    def closed() -> bool:
        now = own()
        return now is not None and not now.spec.rules and bool(now.spec.isolated)

    until("without a rule, the VM is closed", closed)
    until("the peers' group has ended", lambda: list(members()) == ["np-web"])
    platform.cluster.kubectl("delete", "networkpolicy", "web", "-n", ns)
    until("the groups end with the policy", lambda: not groups(platform, ns) and not own())
    assert not platform.missing_rights()
