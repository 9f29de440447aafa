"""EndpointSlices follow the guests that Services select, with one write per real change."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.runtime.controller import (
    ENDPOINT_SLICE,
    Action,
    Create,
    Delete,
    Key,
    RecordEvent,
    Replace,
)
from virtbus.kubebridge.core.service.endpoint_slices import MANAGED_BY, MAX_ENDPOINTS, reconcile
from virtbus.kubebridge.core.service.model import KubeService, Member, Slice, member
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.schemas.network import InterfaceStatus

Json = dict[str, Any]


def service(**spec: Any) -> Json:
    base = {
        "clusterIP": "10.96.0.7",
        "ipFamilies": ["IPv4"],
        "selector": {"app": "web"},
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
    }
    meta = {"name": "web", "namespace": "default", "uid": "service-1"}
    return {"metadata": meta, "spec": base | spec}


def vmi(name: str = "a", *, ready: bool = True, phase: str = "Running", **meta: Any) -> Json:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    own = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {"app": "web"}}
    status = {"phase": phase, "nodeName": "n1", "conditions": [condition]}
    return {"metadata": own | meta, "status": status}


def seen(*args: Any, **more: Any) -> Vmi:
    return read(Vmi, vmi(*args, **more))


def reconciled(service: Json, members: Iterable[Member], there: Iterable[Json]) -> list[Action]:
    """Reconcile a Service as JSON."""
    return reconcile(read(KubeService, service), members, [read(Slice, one) for one in there])


def nic(*addresses: str, network: str = "default") -> InterfaceStatus:
    return InterfaceStatus(name="n", network=network, mac="02:00:00:00:00:01", addresses=addresses)


def guest(number: int = 1, **more: Any) -> Member:
    found = member(
        seen(f"vm-{number}", **more), [nic(f"10.1.{number // 250}.{number % 250 + 1}/24")]
    )
    assert found is not None
    return found


def slices(*actions: Any) -> list[Json]:
    return [one.body for one in actions if isinstance(one, Create | Replace)]


def test_a_selected_guest_is_an_endpoint() -> None:
    (one,) = slices(*reconciled(service(), [guest()], []))
    assert one["metadata"]["labels"] == {
        "kubernetes.io/service-name": "web",
        MANAGED_BY: "kubebridge.virtbus.io",
    }
    (owner,) = one["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Service", "service-1")
    assert (one["addressType"], one["ports"]) == (
        "IPv4", [{"name": "http", "protocol": "TCP", "port": 8080}],
    )  # fmt: skip
    assert one["endpoints"] == [
        {
            "addresses": ["10.1.0.2"],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "nodeName": "n1",
            "targetRef": {
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstance",
                "namespace": "default",
                "name": "vm-1",
                "uid": "uid-vm-1",
            },
        }
    ]


@pytest.mark.parametrize(
    "selector",
    [
        {"vm.kubevirt.io/name": "vm-1"},
        {"vmi.kubevirt.io/id": "vm-1"},
        {"kubevirt.io/created-by": "uid-vm-1", "kubevirt.io": "virt-launcher"},
        {"kubevirt.io": "virt-launcher", "app": "web", "vmi.kubevirt.io/id": "vm-1"},
    ],
)
def test_a_selector_matches_the_labels_of_kubevirts_pod(selector: Json) -> None:
    (one,) = slices(*reconciled(service(selector=selector), [guest(1), guest(2)], []))
    assert [end["targetRef"]["name"] for end in one["endpoints"]] == ["vm-1"]


@pytest.mark.parametrize(
    "spec",
    [{"selector": None}, {"selector": {}}, {"selector": {"app": "db"}}, {"type": "ExternalName"}],
)
def test_a_service_without_guests_has_no_slices(spec: Json) -> None:
    assert reconciled(service(**spec), [guest()], []) == []
    there = stored(slices(*reconciled(service(), [guest()], [])))
    assert reconciled(service(**spec), [guest()], there) == [
        Delete(Key(ENDPOINT_SLICE, "default", "web-virtbus-ipv4-0"), "u0")
    ]


def test_a_running_guest_is_an_endpoint_and_its_condition_makes_it_ready() -> None:
    assert member(seen(phase="Succeeded"), [nic("10.1.0.1/24")]) is None
    assert member(seen(), [nic()]) is None
    assert reconciled(service(), [guest(phase="Scheduled")], []) == []
    (paused,) = slices(*reconciled(service(), [guest(ready=False)], []))
    assert paused["endpoints"][0]["conditions"]["ready"] is False
    leaves = guest(deletionTimestamp="2026-11-22T12:00:00Z")
    (going,) = slices(*reconciled(service(), [leaves], []))
    assert going["endpoints"][0]["conditions"] == {
        "ready": False, "serving": True, "terminating": True,
    }  # fmt: skip


def test_a_service_may_publish_guests_that_are_not_ready() -> None:
    early = service(publishNotReadyAddresses=True)
    (one,) = slices(*reconciled(early, [guest(ready=False, phase="Scheduled")], []))
    assert one["endpoints"][0]["conditions"]["ready"] is True
    assert one["endpoints"][0]["conditions"]["serving"] is False


def test_a_headless_service_need_not_have_ports() -> None:
    (one,) = slices(*reconciled(service(clusterIP="None", ports=None), [guest()], []))
    assert one["metadata"]["labels"]["service.kubernetes.io/headless"] == ""
    assert one["ports"] == []


def test_a_named_port_is_reported() -> None:
    named = {"name": "https", "protocol": "TCP", "port": 443, "targetPort": "tls"}
    both = service(ports=[*service()["spec"]["ports"], named])
    first, _, warn = reconciled(both, [guest()], [])
    assert isinstance(first, Create)
    assert [port["name"] for port in first.body["ports"]] == ["http"]
    assert isinstance(warn, RecordEvent)
    assert "targetPort tls" in warn.message
    assert "write a number" in warn.message
    assert reconciled(service(ports=[named]), [guest()], []) == [warn]
    assert reconciled(service(ports=[named]), [], []) == []


def test_each_address_family_has_its_own_slices() -> None:
    both = member(seen(), [nic("10.1.0.1/24", "fe80::1/64", "fd00::1/64")])
    assert both is not None
    assert both.addresses == {"IPv4": "10.1.0.1", "IPv6": "fd00::1"}
    made = slices(*reconciled(service(ipFamilies=["IPv6", "IPv4"]), [both, guest(2)], []))
    assert [(one["addressType"], len(one["endpoints"])) for one in made] == [
        ("IPv4", 2),
        ("IPv6", 1),
    ]


def test_an_endpoint_has_the_address_of_the_pod_network() -> None:
    two = member(seen(), [nic("10.9.0.1/24", network="lan"), nic("10.1.0.1/24")])
    assert two is not None
    assert two.addresses == {"IPv4": "10.1.0.1"}
    other = member(seen(), [nic(network="default"), nic("10.9.0.1/24", network="lan")])
    assert other is not None
    assert other.addresses == {"IPv4": "10.9.0.1"}


def stored(made: list[Json]) -> list[Json]:
    """Return the slices as an API server stores them."""
    whole = copy.deepcopy(made)
    for number, one in enumerate(whole):
        one["metadata"] |= {"uid": f"u{number}", "resourceVersion": str(number)}
        one["ports"] = one["ports"] or None
    return whole


def test_unchanged_slices_are_not_written() -> None:
    many = [guest(number) for number in range(250)]
    made = slices(*reconciled(service(), many, []))
    assert [len(one["endpoints"]) for one in made] == [100, 100, 50]
    assert reconciled(service(), reversed(many), stored(made)) == []
    bare = service(clusterIP="None", ports=None)
    assert reconciled(bare, many, stored(slices(*reconciled(bare, many, [])))) == []


def test_a_guest_that_comes_or_leaves_changes_one_slice() -> None:
    many = [guest(number) for number in range(250)]
    there = stored(slices(*reconciled(service(), many, [])))
    gone = there[0]["endpoints"][3]["targetRef"]["uid"]
    (less,) = reconciled(service(), [one for one in many if one.uid != gone], there)
    assert isinstance(less, Replace)
    assert less.body["metadata"]["resourceVersion"] == "0"
    assert len(less.body["endpoints"]) == 99
    (more,) = reconciled(service(), [*many, guest(999)], there)
    assert isinstance(more, Replace)
    assert len(more.body["endpoints"]) == 51


def test_a_slice_with_a_name_that_the_bridge_does_not_give_is_removed() -> None:
    (made,) = there = stored(slices(*reconciled(service(), [guest()], [])))
    copied = {**made, "metadata": made["metadata"] | {"uid": "c"}}
    copied["metadata"]["name"] = made["metadata"]["name"] + "07"
    (delete,) = reconciled(service(), [guest()], [*there, copied])
    assert isinstance(delete, Delete)
    assert (delete.key.name, delete.uid) == (copied["metadata"]["name"], "c")


def test_a_recreated_service_owns_its_slices() -> None:
    there = stored(slices(*reconciled(service(), [guest()], [])))
    successor = service()
    successor["metadata"]["uid"] = "service-2"
    (one,) = reconciled(successor, [guest()], there)
    assert isinstance(one, Replace)
    assert one.body["metadata"]["ownerReferences"][0]["uid"] == "service-2"
    successor["metadata"]["deletionTimestamp"] = "2026-11-22T12:00:00Z"
    assert reconciled(successor, [], there) == []


GUESTS = {number: guest(number) for number in range(240)}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sets(st.sampled_from(sorted(GUESTS))), min_size=1, max_size=4))
def test_each_guest_is_in_one_slice_after_any_changes(rounds: list[set[int]]) -> None:
    there: dict[str, Json] = {}
    for chosen in rounds:
        members = [GUESTS[number] for number in chosen]
        for action in reconciled(service(), members, there.values()):
            if isinstance(action, Delete):
                del there[action.key.name]
            elif isinstance(action, Create | Replace):
                there[action.body["metadata"]["name"]] = stored([action.body])[0]
        uids = [e["targetRef"]["uid"] for one in there.values() for e in one["endpoints"]]
        assert sorted(uids) == sorted(one.uid for one in members)
        assert all(0 < len(one["endpoints"]) <= MAX_ENDPOINTS for one in there.values())
        assert reconciled(service(), members, there.values()) == []


def test_an_invalid_address_is_ignored() -> None:
    assert member(seen(), [nic("dhcp")]) is None
    found = member(seen(), [nic("", "10.1.0.300/24", "10.1.0.7/24")])
    assert found is not None
    assert found.addresses == {"IPv4": "10.1.0.7"}
