"""An API server without webhooks enforces each rule in CEL."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from services.kubebridge.tests.manifests import SEED, template, vm
from services.kubebridge.tests.test_rules import BROKEN
from tests.kubernetes.cluster import Cluster

from virtbus.documents.crds.cel import BY_SCHEMA
from virtbus.kubebridge.core.validation.rules import CROWD_RULES, SPEC_RULES, VM_RULES, Rule

pytestmark = pytest.mark.kubernetes

RULES = [rule for rule in (*VM_RULES, *CROWD_RULES, *SPEC_RULES) if rule.cel]
OF_VMS: Mapping[int, dict[str, Any]] = {
    1: {"template": None},
    2: {"runStrategy": "Always"},
    3: {"running": None},
}


def name(rule: Rule) -> str:
    return f"r{RULES.index(rule)}"


def broken(rule: Rule) -> list[dict[str, Any]]:
    """A VM that breaks the rule, and a VMI if the rule is about one."""
    if rule in VM_RULES:
        return [vm(**OF_VMS[rule.number]) | {"metadata": {"name": name(rule)}}]
    if rule in CROWD_RULES:
        changes = {rule.field: [{"name": f"a{index}"} for index in range(257)]}
    else:
        changes, _ = BROKEN[rule.number, rule.field]
    made = template(changes) | {"metadata": {"name": name(rule)}}
    vmi = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name(rule)},
        "spec": made["spec"]["template"]["spec"],
    }
    return [made, vmi]


@pytest.fixture(scope="module")
def told(kubevirt: Cluster) -> dict[tuple[str, str], str]:
    """Return kubectl's error for each object that breaks a rule, by kind and name."""
    objects = [one for rule in RULES for one in broken(rule)]
    listed = json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})
    done = kubevirt.try_kubectl(
        "create", "--validate=false", "--dry-run=server", "-f", "-", stdin=listed
    )
    lines = re.findall(r'(\w+)\.kubevirt\.io "(\w+)" is invalid: (.*)', done.stderr)
    assert len(lines) == len(objects), done.stderr
    return {(kind, named): text for kind, named, text in lines}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.number}-{rule.field}")
def test_a_rule_is_held_without_a_webhook(rule: Rule, told: dict[tuple[str, str], str]) -> None:
    whose = {"VirtualMachine": "spec." if rule in VM_RULES else "spec.template.spec."}
    if rule not in VM_RULES:
        whose["VirtualMachineInstance"] = "spec."
    # `requests.memory` is reported as `requests[memory]`.
    path = rule.field.split("[]")[0].replace("requests.", "requests[")
    for kind, prefix in whose.items():
        said = told[kind, name(rule)]
        assert said.removeprefix("[").startswith(prefix + path), said
        if (rule.number, rule.field) not in BY_SCHEMA:
            words = [one for one in re.split(r"\{+\}+", rule.message) if one]
            assert all(one in said for one in words), said


def test_an_object_that_breaks_no_rule_is_accepted(kubevirt: Cluster) -> None:
    kubevirt.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(SEED))
