"""Checks of fields that virtbus accepts but ignores.

A manifest that KubeVirt refuses is refused here too. Otherwise it would fail only later, when it is
moved to a KubeVirt cluster.
"""
# ruff: noqa: D103  the rule of each check describes it

import re
from collections.abc import Iterator
from typing import Any

from virtbus.kubebridge.core.fields.placement import PREFERRED
from virtbus.kubebridge.core.objects.plain import Object, at, items, part, text
from virtbus.kubebridge.core.translation import affinity
from virtbus.kubebridge.core.validation.rules_checks import Found

POLICIES = ("shared", "auto", "supplementalPool")
EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
VALUES_OF = {
    "In": True,
    "NotIn": True,
    "Exists": False,
    "DoesNotExist": False,
    "Gt": True,
    "Lt": True,
}
"""Operators of a node selector. True means that the operator needs values."""
WEIGHTS = range(1, 101)
_PREFIX = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
_KEY = re.compile(rf"{_PREFIX}[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
"""A qualified name (apimachinery, validation.IsQualifiedName)."""


def toleration(spec: Object) -> Iterator[Found]:
    for index, one in enumerate(items(spec, "tolerations")):
        for field, why in _toleration(one):
            yield f"tolerations[{index}].{field}", (why,)


def _toleration(one: Object) -> Iterator[tuple[str, str]]:
    key, operator = text(one, "key"), text(one, "operator") or "Equal"
    if key and _KEY.fullmatch(key) is None:
        yield "key", "must be the key of a taint, such as example.com/dedicated"
    if operator not in {"Exists", "Equal"}:
        yield "operator", "must be Exists or Equal"
    elif not key and operator != "Exists":
        yield "operator", "must be Exists where key is empty"
    elif operator == "Exists" and text(one, "value"):
        yield "value", "must be empty where operator is Exists"
    if text(one, "effect") not in EFFECTS:
        yield "effect", "must be NoSchedule, PreferNoSchedule or NoExecute"
    if at(one, "tolerationSeconds") is not None and text(one, "effect") != "NoExecute":
        yield "effect", "must be NoExecute where tolerationSeconds is set"


def no_terms(spec: Object) -> Iterator[Found]:
    *above, last = affinity.TERMS
    required = at(spec, *above)
    if required is not None and not at(required, last):
        yield ".".join(affinity.TERMS), ()


def preferred(spec: Object) -> Iterator[Found]:
    for kind, inner in (
        ("nodeAffinity", "preference"),
        ("podAffinity", "podAffinityTerm"),
        ("podAntiAffinity", "podAffinityTerm"),
    ):
        for index, one in enumerate(items(spec, "affinity", kind, PREFERRED)):
            path = f"affinity.{kind}.{PREFERRED}[{index}]"
            if at(one, "weight") not in WEIGHTS:
                yield f"{path}.weight", ("must be 1 to 100",)
            term = part(one, inner)
            found = _preference(term) if kind == "nodeAffinity" else _pod_term(term)
            for field, why in found:
                yield f"{path}.{inner}.{field}", (why,)


def _preference(term: Object) -> Iterator[tuple[str, str]]:
    for field in ("matchExpressions", "matchFields"):
        for index, one in enumerate(items(term, field)):
            for name, why in _expression(one):
                yield f"{field}[{index}].{name}", why


def _expression(one: Object) -> Iterator[tuple[str, str]]:
    operator, values = text(one, "operator"), _list(at(one, "values"))
    if _KEY.fullmatch(text(one, "key")) is None:
        yield "key", "must be the key of a label, such as topology.kubernetes.io/zone"
    if operator not in VALUES_OF:
        yield "operator", f"must be one of {', '.join(VALUES_OF)}"
    elif VALUES_OF[operator] != bool(values):
        wanted = "must be given" if VALUES_OF[operator] else "must be empty"
        yield "values", f"{wanted} where operator is {operator}"
    elif operator in {"Gt", "Lt"} and len(values) != 1:
        yield "values", f"must be one number where operator is {operator}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pod_term(term: Object) -> Iterator[tuple[str, str]]:
    if _KEY.fullmatch(text(term, "topologyKey")) is None:
        yield "topologyKey", "must be the key of a label of nodes"


def thread_policy(spec: Object) -> Iterator[Found]:
    policy = at(spec, "domain", "ioThreadsPolicy")
    if policy is not None and policy not in POLICIES:
        yield "domain.ioThreadsPolicy", ()


def ports(spec: Object) -> Iterator[Found]:
    for index, nic in enumerate(items(spec, "domain", "devices", "interfaces")):
        names: set[str] = set()
        for place, one in enumerate(items(nic, "ports")):
            path = f"domain.devices.interfaces[{index}].ports[{place}]"
            if at(one, "port") not in range(1, 65536):
                yield f"{path}.port", ("must be 1 to 65535",)
            name = text(one, "name")
            if name in names:
                yield f"{path}.name", ("is used twice; give each port a name of its own",)
            if name:
                names.add(name)
