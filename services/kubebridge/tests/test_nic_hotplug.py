"""Interfaces that a changed template plugs into a running guest, and networks of Multus."""

import json
from typing import Any

import pytest
from services.kubebridge.tests.manifests import vmi as smoke_vmi
from services.kubebridge.tests.world import CLUSTER, NOW, World, world

from virtbus.kubebridge.core.objects.status_errors import Cause
from virtbus.kubebridge.core.objects.unstructured import Object, read
from virtbus.kubebridge.core.runtime.controller import ATTACHMENT, BusCall, Key, Refused
from virtbus.kubebridge.core.translation.mapping import Translated, translate
from virtbus.kubebridge.core.validation.rules import vmi_causes
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.kubebridge.core.vmi.reconcile import definitions, reconcile
from virtbus.kubebridge.core.vmi.status import Seen, status
from virtbus.schemas.cni_config import plugins_digest
from virtbus.schemas.guest import GuestInfo, GuestInterface
from virtbus.schemas.network import InterfaceStatus, LinkState, PlugState
from virtbus.schemas.nic import NicBinding
from virtbus.schemas.vm import Interface

NIC, NETS = "domain.devices.interfaces", "networks"
MORE = {
    f"{NIC}.1": {"name": "more", "bridge": {}},
    f"{NETS}.1": {"name": "more", "multus": {"networkName": "lan"}},
}


def nic(name: str, **fields: Any) -> InterfaceStatus:
    """Return an interface of a guest, as the bus shows it."""
    mac = "02:00:00:00:00:01" if name == "default" else "02:00:00:00:00:02"
    return InterfaceStatus(name=name, network="default", mac=mac, **fields)


def template(w: World) -> dict[str, Any]:
    assert w.vm is not None
    spec: dict[str, Any] = w.vm["spec"]["template"]["spec"]
    return spec


def names(spec: dict[str, Any]) -> list[str]:
    return [one["name"] for one in spec["domain"]["devices"]["interfaces"]]


def has(w: World, *found: InterfaceStatus) -> None:
    """Let the guest have these interfaces."""
    w.views[w.uid] = w.views[w.uid].model_copy(update={"interfaces": found})


def on_bus(w: World) -> dict[str, tuple[str, LinkState | None]]:
    spec = w.views[w.uid].spec
    networks = {one.name: one.network for one in spec.networks}
    return {one.name: (networks[one.name], one.state) for one in spec.domain.devices.interfaces}


def conditions(w: World) -> set[str]:
    assert w.vm is not None
    return {one["type"] for one in w.vm["status"]["conditions"] if one["status"] == "True"}


def plugged() -> World:
    """Return a running VM whose template got a second interface."""
    w = world()
    w.settle()
    has(w, nic("default"))
    spec = template(w)
    spec["domain"]["devices"]["interfaces"].append({"name": "more", "bridge": {}})
    spec["networks"].append({"name": "more", "multus": {"networkName": "lan"}})
    w.user()
    w.settle()
    return w


def test_an_interface_that_the_template_adds_is_plugged_into_the_running_guest() -> None:
    w = plugged()
    assert on_bus(w) == {"default": ("default", None), "more": ("lan", None)}
    assert w.made == 1
    assert w.vmi is not None
    assert names(w.vmi["spec"]) == ["default", "more"]
    assert "RestartRequired" not in conditions(w)
    has(w, nic("default"), nic("more", plug=PlugState.WAITING))
    w.settle()
    sources = [one["infoSource"] for one in w.vmi["status"]["interfaces"]]
    assert sources == ["domain", "multus-status"]


def test_an_absent_interface_leaves_the_guest_and_then_both_specs() -> None:
    w = plugged()
    has(w, nic("default"), nic("more"))
    w.settle()
    template(w)["domain"]["devices"]["interfaces"][1]["state"] = "absent"
    w.user()
    w.settle()
    assert w.vmi is not None
    assert list(on_bus(w)) == ["default"]
    assert names(w.vmi["spec"]) == ["default", "more"], "the guest has not released it"
    assert names(template(w)) == ["default", "more"]
    has(w, nic("default"))
    w.settle()
    assert names(w.vmi["spec"]) == names(template(w)) == ["default"]
    assert [one["name"] for one in template(w)["networks"]] == ["default"]
    assert (w.made, "RestartRequired" in conditions(w)) == (1, False)


def test_the_link_state_of_the_template_is_that_of_the_running_guest() -> None:
    w = world()
    w.settle()
    has(w, nic("default"))
    for state, wanted in (("down", LinkState.DOWN), ("up", LinkState.UP)):
        template(w)["domain"]["devices"]["interfaces"][0]["state"] = state
        w.user()
        w.settle()
        assert on_bus(w)["default"][1] is wanted
    assert "RestartRequired" not in conditions(w)
    has(w, nic("default", state=LinkState.DOWN, queues=2))
    w.settle()
    assert w.vmi is not None
    (shown,) = w.vmi["status"]["interfaces"]
    assert (shown["linkState"], shown["queueCount"]) == ("down", 2)


def test_other_changes_of_interfaces_require_a_restart() -> None:
    w = plugged()
    has(w, nic("default"), nic("more"))
    interfaces = template(w)["domain"]["devices"]["interfaces"]
    interfaces[1]["model"] = "e1000e"
    w.user()
    w.settle()
    assert "RestartRequired" in conditions(w)
    del interfaces[1], template(w)["networks"][1]
    w.user()
    w.settle()
    assert "RestartRequired" in conditions(w), "without `absent`, it waits for the next start"
    assert list(on_bus(w)) == ["default", "more"]


def test_an_absent_interface_of_a_stopped_vm_is_removed_from_its_template() -> None:
    w = world(runStrategy="Halted", running=None)
    spec = template(w)
    spec["domain"]["devices"]["interfaces"].append(
        {"name": "more", "bridge": {}, "state": "absent"}
    )
    spec["networks"].append({"name": "more", "multus": {"networkName": "lan"}})
    w.settle()
    assert names(template(w)) == ["default"]


def test_a_refused_change_is_shown_and_repeated() -> None:
    w = plugged()
    assert w.vmi is not None
    old = w.views[w.uid]
    fewer = old.spec.domain.devices.model_copy(
        update={"interfaces": old.spec.domain.devices.interfaces[:1]}
    )
    spec = old.spec.model_copy(
        update={
            "domain": old.spec.domain.model_copy(update={"devices": fewer}),
            "networks": old.spec.networks[:1],
        }
    )
    refused = Refused(404, "network_unknown", "there is no network 'lan'")
    seen = Seen(view=old.model_copy(update={"spec": spec}), refused=refused)
    plan = reconcile(read(Vmi, w.vmi), seen, {}, NOW, CLUSTER)
    assert [one.verb for one in plan if isinstance(one, BusCall)] == ["update"]
    (shown,) = (
        one
        for one in status(read(Vmi, w.vmi), seen, NOW)["conditions"]
        if one["type"] == "Synchronized"
    )
    assert (shown["reason"], shown["message"]) == ("FailedUpdate", refused.message)


# --- bindings -----------------------------------------------------------------------------------
def first_nic(**fields: Any) -> tuple[Interface | None, tuple[Cause, ...]]:
    """Return the first interface of a VMI on the bus, and the problems."""
    pod = fields.pop("pod", {})
    changes = {f"{NIC}.0": {"name": "default", **fields}, f"{NETS}.0.pod": pod}
    found = translate(smoke_vmi(changes), {}, CLUSTER, contents=False)
    if found.create is None or found.create.spec is None:
        return None, found.causes
    return found.create.spec.domain.devices.interfaces[0], found.causes


def test_masquerade_has_declared_ports_and_networks() -> None:
    nic, causes = first_nic(
        masquerade={},
        ports=[{"port": 80, "name": "web"}, {"port": 53, "protocol": "UDP"}],
        portRanges=[{"start": 8000, "end": 8010, "protocol": "TCP"}],
        pod={"vmNetworkCIDR": "10.11.12.13/24", "vmIPv6NetworkCIDR": "fd00:11::/120"},
    )
    assert causes == ()
    assert nic is not None
    assert nic.binding is NicBinding.MASQUERADE
    assert [port.text for port in nic.ports] == ["80/tcp", "53/udp", "8000-8010/tcp"]
    assert (nic.vm_network_cidr, nic.vm_ipv6_network_cidr) == ("10.11.12.0/24", "fd00:11::/120")


def test_ports_of_bridge_close_nothing_as_in_kubevirt() -> None:
    nic, causes = first_nic(bridge={}, ports=[{"port": 80}], pod={"vmNetworkCIDR": "10.11.12.0/24"})
    assert causes == ()
    assert nic is not None
    assert (nic.binding, nic.ports, nic.vm_network_cidr) == (None, (), None)


def test_macvtap_asks_for_a_network_of_its_kind() -> None:
    nic, causes = first_nic(macvtap={})
    assert causes == ()
    assert nic is not None
    assert nic.binding is NicBinding.MACVTAP


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ports": [{"port": 0}]}, "interfaces[0].ports[0]"),
        ({"ports": [{"port": 80, "protocol": "SCTP"}]}, "interfaces[0].ports[0].protocol"),
        ({"portRanges": [{"start": 9, "end": 8, "protocol": "TCP"}]}, "portRanges[0].end"),
        ({"pod": {"vmNetworkCIDR": "10.0.0.0"}}, "networks[0].pod.vmNetworkCIDR"),
        ({"pod": {"vmNetworkCIDR": "nonsense"}}, "networks[0].pod.vmNetworkCIDR"),
        ({"pod": {"vmIPv6NetworkCIDR": "10.0.0.0/8"}}, "networks[0].pod.vmIPv6NetworkCIDR"),
    ],
)
def test_odd_ports_and_networks_are_refused_at_their_fields(
    fields: dict[str, Any], field: str
) -> None:
    nic, causes = first_nic(masquerade={}, **fields)
    assert nic is None
    assert any(field in cause.field for cause in causes), causes


def test_the_status_has_the_address_of_the_network_and_not_the_guests_own() -> None:
    w = world()
    w.settle()
    shown = nic("default", binding="masquerade", addresses=("10.127.0.9/16",))
    has(w, shown)
    inside = GuestInterface(name="eth0", mac=shown.mac, addresses=("10.0.2.2/24",))
    seen = Seen(view=w.views[w.uid], guest=GuestInfo(interfaces=(inside,)), asked=True)
    assert w.vmi is not None
    (reported,) = status(read(Vmi, w.vmi), seen, NOW)["interfaces"]
    assert reported["ipAddresses"] == ["10.127.0.9"]
    assert reported["interfaceName"] == "eth0"


# --- NetworkAttachmentDefinitions ---------------------------------------------------------------
def translated(named: str, **definition: Any) -> Translated:
    vmi = smoke_vmi(MORE | {f"{NETS}.1.multus": {"networkName": named}})
    given: dict[tuple[str, str], Object] = {}
    if definition:
        given["NetworkAttachmentDefinition", named.rpartition("/")[2]] = definition
    return translate(vmi, given, CLUSTER, contents=False)


@pytest.mark.parametrize(
    ("named", "definition", "network"),
    [
        ("lan", {}, "lan"),
        ("lan", {"spec": {}}, "lan"),
        ("default/lan", {"spec": {"config": json.dumps({"name": "blue", "type": "ptp"})}}, "blue"),
        ("lan", {"spec": {"config": json.dumps({"plugins": [{"type": "ptp"}]})}}, "lan"),
        (
            "lan.one",
            {
                "metadata": {"annotations": {"virtbus.io/network": "green"}},
                "spec": {"config": json.dumps({"name": "blue"})},
            },
            "green",
        ),
    ],
)
def test_a_definition_names_a_network_of_the_bus(
    named: str, definition: dict[str, Any], network: str
) -> None:
    found = translated(named, **definition)
    assert found.causes == ()
    assert found.create is not None
    assert found.create.spec is not None
    assert found.create.spec.networks[1].network == network


@pytest.mark.parametrize(
    ("named", "definition", "part"),
    [
        ("other/lan", {}, "of its own namespace; create lan in default"),
        ("lan.one", {}, "write it into the annotation virtbus.io/network"),
        ("lan", {"spec": {"config": "{nonsense"}}, "lan has no CNI configuration: its spec.config"),
        ("lan", {"spec": {"config": "blue"}}, "spec.config is not JSON"),
        ("lan", {"spec": {"config": "[" * 60_000}}, "spec.config is not JSON"),
        ("lan", {"spec": {"config": "[]"}}, "spec.config is no JSON object"),
        ("lan", {"spec": {"config": "null"}}, "spec.config is no JSON object"),
        ("lan", {"spec": {"config": "{}" + " " * 65_536}}, "spec.config is longer than 65536"),
        ("lan", {"spec": {"config": json.dumps({"name": "Big_Net"})}}, "'Big_Net' is no name"),
    ],
)
def test_a_definition_that_names_none_is_refused_at_its_field(
    named: str, definition: dict[str, Any], part: str
) -> None:
    (cause,) = translated(named, **definition).causes
    assert cause.field == "spec.networks[1].multus.networkName"
    assert part in cause.message


def test_plugins_of_a_definition_have_to_be_those_of_the_network() -> None:
    plugin = {"type": "macvlan", "master": "eth1"}
    config = {"cniVersion": "1.0.0", "name": "blue", **plugin}
    ours = plugins_digest({"plugins": [plugin]})
    annotated = {"metadata": {"annotations": {"virtbus.io/network": "blue"}}}
    for given, digest in (
        ({"spec": {"config": json.dumps(config)}}, ours),
        ({"spec": {"config": json.dumps({"name": "blue", "plugins": [plugin]})}}, ours),
        ({"spec": {"config": json.dumps({"name": "blue"})}}, None),
        ({"spec": {"config": json.dumps(config)}, **annotated}, None),
    ):
        found = translated("lan", **given)
        assert found.create is not None
        assert found.create.spec is not None
        network = found.create.spec.networks[1]
        assert (network.network, network.plugins_digest) == ("blue", digest)


def test_only_definitions_of_the_own_namespace_are_read() -> None:
    vmi = smoke_vmi(MORE | {f"{NETS}.2": {"name": "x", "multus": {"networkName": "kube/secret"}}})
    assert definitions(read(Vmi, vmi)) == {Key(ATTACHMENT, "default", "lan")}


def test_a_webhook_refuses_definitions_of_other_namespaces_and_bindings_that_are_missing() -> None:
    elsewhere = {**MORE, f"{NETS}.1.multus": {"networkName": "kube/lan"}}
    (cause,) = vmi_causes(smoke_vmi(elsewhere))
    assert cause.field == "spec.networks[1].multus.networkName"
    with_it = {**MORE, f"{NIC}.1": {"name": "more", "slirp": {}}}
    messages = [cause.message for cause in vmi_causes(smoke_vmi(with_it))]
    assert any("write bridge: {} or masquerade: {}" in one for one in messages)
    lan = {"name": "more", "multus": {"networkName": "lan"}}
    macvtap = {f"{NIC}.1": {"name": "more", "macvtap": {}}, f"{NETS}.1": lan}
    assert vmi_causes(smoke_vmi(macvtap)) == []


def other() -> dict[str, Any]:
    """Return a second network, without an interface."""
    return {f"{NETS}.1": {"name": "more", "multus": {"networkName": "lan"}}}


@pytest.mark.parametrize(
    "binding", [{"passt": {}}, {"passtBinding": {}}, {"binding": {"name": "passt"}}]
)
def test_passt_is_a_binding_of_the_bus_and_forwards_the_listed_ports(
    binding: dict[str, Any],
) -> None:
    ports = [{"name": "web", "port": 80}, {"port": 53, "protocol": "UDP"}]
    for found, expected in ((binding, "passt"), ({"bridge": {}}, None)):
        wanted = {"name": "more", "ports": ports, **found}
        vmi = smoke_vmi({**other(), f"{NIC}.1": wanted})
        create = translate(vmi, {}, CLUSTER, contents=False).create
        assert create is not None
        assert create.spec is not None
        more = create.spec.domain.devices.interfaces[1]
        assert more.binding == expected
        forwarded = [(one.port, one.protocol) for one in more.ports]
        assert forwarded == ([(80, "tcp"), (53, "udp")] if expected else [])


def test_another_binding_plugin_is_refused_at_its_name() -> None:
    with_it = {**other(), f"{NIC}.1": {"name": "more", "binding": {"name": "slirp"}}}
    (cause,) = vmi_causes(smoke_vmi(with_it))
    assert cause.field == "spec.domain.devices.interfaces[1].binding.name"
    assert "write passt" in cause.message
