"""A stolen token of the bridge: admission policies restrict it further than RBAC can (L8)."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from tests.kubernetes.cluster import CRDS, Cluster
from tests.kubernetes.installed import PLAIN, account
from tests.kubernetes.test_chart import chart, values

from virtbus.kubebridge.core.node.labels import HEARTBEAT, OURS, SCHEDULABLE
from virtbus.kubebridge.core.runtime.controller import NODE
from virtbus.kubebridge.core.service.endpoint_slices import MANAGED_BY, MANAGER
from virtbus.kubebridge.edge import cluster as door

pytestmark = pytest.mark.kubernetes
RIGHTS = {
    *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
}


class Bridge:
    """Run kubectl with the rights of the bridge's service account."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._login = account(cluster)
        self.said = ""

    def may(self, *args: str, stdin: Any = None) -> bool:
        """Return True if the API server accepted it; only a policy or RBAC may refuse it."""
        text = json.dumps(stdin) if stdin is not None else None
        done = self._cluster.try_kubectl(*args, stdin=text, kubeconfig=self._login)
        self.said = done.stderr
        refused = "the bridge " in done.stderr or "forbidden" in done.stderr.lower()
        assert done.returncode == 0 or refused, done.stderr
        return done.returncode == 0

    def changes(self, patch: dict[str, Any]) -> bool:
        """Return True if a merge patch of the Node is accepted; kubectl would read it before."""

        async def ask() -> None:
            async with door.connect(self._login) as client:
                await client.patch(NODE, "rights-a", patch)

        try:
            asyncio.run(ask())
        except door.StatusError as answer:
            self.said = str(answer)
            return False
        return True


@pytest.fixture(scope="module")
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    cluster.kubectl("apply", "-f", str(CRDS))
    objects = [one for one in yaml.safe_load_all(PLAIN.read_text()) if one["kind"] in RIGHTS]
    for kinds in ({"Namespace"}, RIGHTS - {"Namespace"}):
        listed = [one for one in objects if one["kind"] in kinds]
        whole = {"kind": "List", "apiVersion": "v1", "items": listed}
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(whole))
    metadata = {"name": "rights-a", "labels": {"team": "a"}, "annotations": {"note": "a"}}
    made = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(made))
    one = Bridge(cluster)
    _until_policies_hold(one)
    yield one
    cluster.kubectl("delete", "node", "rights-a")
    ends = {
        "kind": "List",
        "apiVersion": "v1",
        "items": [each for each in objects if each["kind"] != "Namespace"],
    }
    cluster.kubectl("delete", "--wait=false", "-f", "-", stdin=json.dumps(ends))


def _until_policies_hold(one: Bridge) -> None:
    """API servers load new roles within some seconds, and each policy in its own time."""
    attempts = itertools.count()

    def marks(key: str) -> bool:
        return one.changes({"metadata": {"labels": {key: f"v{next(attempts)}"}}})

    def takes_a_slice() -> bool:
        return one.may("create", "--dry-run=server", "-f", "-", stdin=_slice("try"))

    waits: list[tuple[Callable[[], bool], bool]] = [
        (lambda: marks(OURS), True),
        (lambda: marks("try"), False),
        (takes_a_slice, False),
    ]
    for accepted, wanted in waits:
        end_s = time.monotonic() + 20
        while accepted() is not wanted:
            assert time.monotonic() < end_s, one.said


def test_the_bridge_changes_its_own_marks_of_a_node(bridge: Bridge) -> None:
    own = {"labels": {SCHEDULABLE: "true", OURS: "true"}, "annotations": {HEARTBEAT: "now"}}
    assert bridge.changes({"metadata": own})
    gone = {"labels": {SCHEDULABLE: None, OURS: None}, "annotations": {HEARTBEAT: None}}
    assert bridge.changes({"metadata": gone})


@pytest.mark.parametrize(
    "patch",
    [
        {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
        {"metadata": {"labels": {"team": "b"}}},
        {"metadata": {"labels": {"team": None}}},
        {"metadata": {"annotations": {"note": "b"}}},
        {"metadata": {"annotations": {"more": "b"}}},
        {"metadata": {"finalizers": ["kubernetes.io/x"]}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}},
    ],
    ids=str,
)
def test_the_bridge_changes_nothing_else_of_a_node(bridge: Bridge, patch: dict[str, Any]) -> None:
    assert not bridge.changes(patch)
    assert "the bridge changes" in bridge.said


def _slice(name: str, **labels: str) -> dict[str, Any]:
    found = {"kubernetes.io/service-name": "kubernetes", **labels}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": found},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["192.0.2.1"]}],
        "ports": [],
    }


def test_the_bridge_touches_the_endpoint_slices_that_it_manages(
    bridge: Bridge, cluster: Cluster
) -> None:
    own, others = {MANAGED_BY: MANAGER}, {MANAGED_BY: "endpointslice-controller.k8s.io"}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(_slice("others", **others)))
    assert not bridge.may("create", "-f", "-", stdin=_slice("b", **others))
    assert not bridge.may("create", "-f", "-", stdin=_slice("c"))
    assert bridge.may("create", "-f", "-", stdin=_slice("own", **own))
    assert bridge.may("replace", "-f", "-", stdin=_slice("own", **own, more="x"))
    assert not bridge.may("replace", "-f", "-", stdin=_slice("own", **others))
    assert not bridge.may("replace", "-f", "-", stdin=_slice("others", **own))
    assert not bridge.may("delete", "endpointslice", "others", "-n", "default")
    assert bridge.may("delete", "endpointslice", "own", "-n", "default")
    cluster.kubectl("delete", "endpointslice", "others", "-n", "default")


def test_the_bridge_gets_and_watches_secrets_and_cannot_list_them(bridge: Bridge) -> None:
    watch = "/api/v1/namespaces/default/secrets?watch=true&timeoutSeconds=1"
    assert bridge.may("get", "--raw", watch)
    assert not bridge.may("get", "--raw", watch.partition("?")[0])
    assert not bridge.may("delete", "secrets", "--all", "-n", "default")


def test_secrets_can_be_left_to_namespaces_that_have_vms() -> None:
    given = values()
    assert ("ClusterRoleBinding", "virtbus-kubebridge-inputs") in chart(given)
    given["inputs"] = {"allNamespaces": False}
    made = chart(given, "--set=inputs.allNamespaces=false")
    assert ("ClusterRoleBinding", "virtbus-kubebridge-inputs") not in made
    rules = made["ClusterRole", "virtbus-kubebridge"]["rules"]
    assert not [rule for rule in rules if "secrets" in rule["resources"]]
