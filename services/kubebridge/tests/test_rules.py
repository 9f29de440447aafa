"""A manifest for each rule breaks this rule and no other."""

import base64
from collections.abc import Mapping
from typing import Any

import pytest
from services.kubebridge.tests.manifests import put, template, vm, vmi

from virtbus.kubebridge.core.validation.rules import (
    CROWD_RULES,
    SPEC_RULES,
    VM_RULES,
    VMI_RULES,
    Rule,
    foreign_vmi_causes,
    vm_causes,
    vmi_causes,
)

AT = "spec.template.spec."
NIC = {"name": "default", "bridge": {}}


def more(source: dict[str, Any]) -> dict[str, Any]:
    """Return changes that add a volume."""
    return {"volumes.3": {"name": "more", **source}}


def keys(ways: dict[str, Any]) -> dict[str, Any]:
    """Return changes that add SSH keys with these propagation methods."""
    source = {"secret": {"secretName": "a"}}
    return {"accessCredentials": [{"sshPublicKey": {"source": source, "propagationMethod": ways}}]}


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
TERMS = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"


def nodes(*terms: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Return changes that add node affinity."""
    made = [
        {"matchExpressions": [{"key": k, "operator": "In", "values": v} for k, v in term]}
        for term in terms
    ]
    _, kind, required, _ = TERMS.split(".")
    return {"affinity": {kind: {required: {"nodeSelectorTerms": made}}}}


BROKEN: Mapping[tuple[int, str], tuple[dict[str, Any], str]] = {
    (20, "domain.resources.requests.memory"): (
        {"domain.resources.limits": {"memory": "3G"}, "domain.memory.guest": "1G"},
        "domain.resources.requests.memory",
    ),
    (26, "domain.resources.requests.cpu"): (
        {"domain.resources.requests.cpu": 2, "domain.resources.limits.cpu": 1},
        "domain.resources.requests.cpu",
    ),
    (46, "volumes[].name"): (
        {"volumes.3": {"name": "emptydisk", "emptyDisk": {"capacity": "1Gi"}}},
        "volumes[3].name",
    ),
    (47, "volumes[]"): ({"volumes.1.containerDisk": {"image": "a/b"}}, "volumes[1]"),
    (50, "domain.devices.disks[].name"): (
        {"domain.devices.disks.3": {"name": "other", "disk": {}}},
        "domain.devices.disks[3].name",
    ),
    (51, "domain.devices.disks[].name"): (
        {"domain.devices.disks.3": {"name": "emptydisk", "disk": {}}},
        "domain.devices.disks[3].name",
    ),
    (52, "domain.devices.disks[]"): (
        {"domain.devices.disks.1.cdrom": {}},
        "domain.devices.disks[1]",
    ),
    (55, "domain.devices.disks[].cdrom.bus"): (
        {"domain.devices.disks.1": {"name": "emptydisk", "cdrom": {"bus": "virtio"}}},
        "domain.devices.disks[1].cdrom.bus",
    ),
    (56, "domain.devices.disks[].disk.readonly"): (
        {"domain.devices.disks.1.disk": {"bus": "sata", "readonly": True}},
        "domain.devices.disks[1].disk.readonly",
    ),
    (58, "domain.devices.disks[].bootOrder"): (
        {"domain.devices.disks.0.bootOrder": 1, "domain.devices.disks.1.bootOrder": 1},
        "domain.devices.disks[1].bootOrder",
    ),
    (64, "volumes[].cloudInitNoCloud"): (
        {"volumes.2.cloudInitNoCloud.secretRef": {"name": "a"}},
        "volumes[2].cloudInitNoCloud",
    ),
    (65, "volumes[].cloudInitNoCloud"): (
        {"volumes.2.cloudInitNoCloud": {}},
        "volumes[2].cloudInitNoCloud",
    ),
    (66, "volumes[].cloudInitNoCloud"): (
        {"volumes.2.cloudInitNoCloud.userData": "x" * 2049},
        "volumes[2].cloudInitNoCloud",
    ),
    (64, "volumes[].cloudInitConfigDrive"): (
        more({"cloudInitConfigDrive": {"userData": "a", "secretRef": {"name": "a"}}}),
        "volumes[3].cloudInitConfigDrive",
    ),
    (65, "volumes[].cloudInitConfigDrive"): (
        more({"cloudInitConfigDrive": {}}),
        "volumes[3].cloudInitConfigDrive",
    ),
    (66, "volumes[].cloudInitConfigDrive"): (
        more({"cloudInitConfigDrive": {"userDataBase64": "a" * 3000}}),
        "volumes[3].cloudInitConfigDrive",
    ),
    (68, "volumes[].hostDisk"): (
        more({"hostDisk": {"path": "/srv/a.img", "type": "Disk", "capacity": "1Gi"}}),
        "volumes[3].hostDisk.capacity",
    ),
    (70, "volumes[].configMap.name"): (more({"configMap": {}}), "volumes[3].configMap.name"),
    (70, "volumes[].secret.secretName"): (more({"secret": {}}), "volumes[3].secret.secretName"),
    (70, "volumes[].sysprep"): (more({"sysprep": {"secret": {}}}), "volumes[3].sysprep"),
    (73, "networks[].name"): (
        {"networks.1": {"name": "lan", "multus": {"networkName": "lan"}}},
        "networks[1].name",
    ),
    (73, "domain.devices.interfaces[].name"): (
        {"domain.devices.interfaces.1": {"name": "lan", "bridge": {}}},
        "domain.devices.interfaces[1].name",
    ),
    (74, "networks[].name"): (
        {"networks.1": {"name": "default", "multus": {"networkName": "lan"}}},
        "networks[1].name",
    ),
    (75, "domain.devices.interfaces[].name"): (
        {"domain.devices.interfaces.1": NIC},
        "domain.devices.interfaces[1].name",
    ),
    (76, "domain.devices.interfaces[]"): (
        {"domain.devices.interfaces.0.masquerade": {}},
        "domain.devices.interfaces[0]",
    ),
    (77, "domain.devices.interfaces[].name"): (
        {
            "networks.0": {"name": "default", "multus": {"networkName": "lan"}},
            "domain.devices.interfaces.0": {"name": "default", "masquerade": {}},
        },
        "domain.devices.interfaces[0].name",
    ),
    (79, "domain.devices.interfaces[].macAddress"): (
        {
            "domain.devices.interfaces.0": {
                "name": "default",
                "masquerade": {},
                "macAddress": "02:00:00:00:00:00",
            }
        },
        "domain.devices.interfaces[0].macAddress",
    ),
    (81, "networks[].pod"): (
        {
            "networks.1": {"name": "two", "pod": {}},
            "domain.devices.interfaces.1": {"name": "two", "bridge": {}},
        },
        "networks[1].pod",
    ),
    (81, "networks[]"): (
        {"networks.0.multus": {"networkName": "lan"}},
        "networks[0]",
    ),
    (95, "accessCredentials[].sshPublicKey.propagationMethod"): (
        keys({"configDrive": {}}),
        "accessCredentials[0].sshPublicKey.propagationMethod",
    ),
    (95, "accessCredentials[].sshPublicKey"): (
        keys({}),
        "accessCredentials[0].sshPublicKey.propagationMethod",
    ),
    (0, TERMS): (nodes([("a", ["b"])], [("a", ["c"])]), TERMS),
    (0, f"{TERMS}[].matchExpressions[].values"): (
        nodes([("a", ["b"]), ("c", ["d", "e"])]),
        f"{TERMS}[0].matchExpressions[1].values",
    ),
    (0, "nodeSelector"): (
        {**nodes([("a", ["b"])]), "nodeSelector": {"a": "c"}},
        f"{TERMS}[0].matchExpressions[0].values",
    ),
    (95, "accessCredentials[]"): ({"accessCredentials": [{}]}, "accessCredentials[0]"),
    (95, "accessCredentials[].sshPublicKey.source"): (
        {"accessCredentials": [{"sshPublicKey": {"propagationMethod": {"noCloud": {}}}}]},
        "accessCredentials[0].sshPublicKey.source",
    ),
    (0, TERMS.rpartition(".")[0]): (nodes(), TERMS),
    (0, "tolerations[]"): ({"tolerations": [{"operator": "Is"}]}, "tolerations[0].operator"),
    (0, "affinity"): (
        {f"affinity.nodeAffinity.{PREFERRED}": [{"weight": 101, "preference": {}}]},
        f"affinity.nodeAffinity.{PREFERRED}[0].weight",
    ),
    (0, "domain.devices.interfaces[].ports[]"): (
        {"domain.devices.interfaces.0.ports": [{"port": 0}]},
        "domain.devices.interfaces[0].ports[0].port",
    ),
}  # fmt: skip


def key(rule: Rule) -> tuple[int, str]:
    return rule.number, rule.field


def test_each_rule_has_a_manifest() -> None:
    assert {key(rule) for rule in SPEC_RULES} == set(BROKEN)


@pytest.mark.parametrize("rule", SPEC_RULES, ids=lambda rule: f"{rule.number}-{rule.field}")
def test_a_violation_has_its_field_and_reason(rule: Rule) -> None:
    changes, field = BROKEN[key(rule)]
    found = [(cause.field, cause.reason) for cause in vm_causes(template(changes))]
    assert found == [(AT + field, rule.reason)]


@pytest.mark.parametrize("count", [2047, 2048])
def test_base64_is_measured_decoded(count: int) -> None:
    encoded = base64.encodebytes(b"#" * count).decode()
    fits = template({"volumes.2.cloudInitNoCloud": {"userDataBase64": encoded}})
    assert vm_causes(fits) == []
    larger = base64.b64encode(b"#" * 2049).decode()
    (cause,) = vm_causes(template({"volumes.2.cloudInitNoCloud": {"userDataBase64": larger}}))
    assert cause.field == f"{AT}volumes[2].cloudInitNoCloud"


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (1, {"template": None}),
        (2, {"runStrategy": "Always"}),
        (3, {"running": None}),
    ],
)
def test_a_violation_in_a_vm_is_reported(rule: int, changes: dict[str, Any]) -> None:
    (expected,) = [one for one in VM_RULES if one.number == rule]
    (cause,) = vm_causes(vm(**changes))
    assert (cause.field, cause.reason) == (f"spec.{expected.field}", expected.reason)
    assert cause.plain() == {
        "field": cause.field,
        "message": cause.message,
        "reason": str(expected.reason),
    }


@pytest.mark.parametrize("rule", CROWD_RULES, ids=lambda rule: rule.field)
def test_a_list_that_is_too_long_is_the_only_reported_problem(rule: Rule) -> None:
    crowd = {rule.field: [{"name": "a"}] * 257}
    assert [cause.field for cause in vm_causes(template(crowd))] == [AT + rule.field]
    assert [cause.field for cause in vmi_causes(vmi(crowd))] == [f"spec.{rule.field}"]


def test_only_the_bridge_may_set_a_reserved_label() -> None:
    labels = {"kubevirt.io/nodeName": "n1", "kubevirt.io/other": "x"}
    (cause,) = foreign_vmi_causes(put(vmi(), {"metadata.labels": labels}))
    assert (cause.field, cause.reason) == ("metadata.labels", VMI_RULES[0].reason)
    assert "nodeName" in cause.message
    assert foreign_vmi_causes(vmi()) == []
