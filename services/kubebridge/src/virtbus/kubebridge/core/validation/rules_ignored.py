"""Checks of fields that virtbus accepts but ignores.

A manifest that KubeVirt refuses is refused here too. Otherwise it would fail only later, when it is
moved to a KubeVirt cluster.
"""

import re
from collections.abc import Iterator
from typing import Any

from virtbus.kubebridge.core.fields.placement import PREFERRED
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text
from virtbus.kubebridge.core.validation.rules_checks import Check, Found, each, names_twice, when

POLICIES = (None, "shared", "auto", "supplementalPool")
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
WEIGHTS, PORTS = range(1, 101), range(1, 65536)
_PREFIX = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
_KEY = re.compile(rf"{_PREFIX}[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
"""A qualified name (apimachinery, validation.IsQualifiedName)."""


def toleration(one: Object) -> Iterator[Found]:
    """Find problems of a toleration."""
    key, operator = text(one, "key"), text(one, "operator") or "Equal"
    if key and _KEY.fullmatch(key) is None:
        yield ".key", "must be the key of a taint, such as example.com/dedicated"
    if operator not in {"Exists", "Equal"}:
        yield ".operator", "must be Exists or Equal"
    elif not key and operator != "Exists":
        yield ".operator", "must be Exists where key is empty"
    elif operator == "Exists" and text(one, "value"):
        yield ".value", "must be empty where operator is Exists"
    if text(one, "effect") not in EFFECTS:
        yield ".effect", "must be NoSchedule, PreferNoSchedule or NoExecute"
    if at(one, "tolerationSeconds") is not None and text(one, "effect") != "NoExecute":
        yield ".effect", "must be NoExecute where tolerationSeconds is set"


def _preferred(kind: str, inner: str, check: Check) -> Check:
    def checked(one: Object) -> Iterator[Found]:
        yield from when(at(one, "weight") not in WEIGHTS, ".weight", "must be 1 to 100")
        yield from ((f".{inner}{below}", *shown) for below, *shown in check(part(one, inner)))

    return each(f"affinity.{kind}.{PREFERRED}", checked)


def _preference(term: Object) -> Iterator[Found]:
    for field in ("matchExpressions", "matchFields"):
        yield from ((f".{path}", *shown) for path, *shown in each(field, _expression)(term))


def _expression(one: Object) -> Iterator[Found]:
    operator, values = text(one, "operator"), _list(at(one, "values"))
    if _KEY.fullmatch(text(one, "key")) is None:
        yield ".key", "must be the key of a label, such as topology.kubernetes.io/zone"
    if operator not in VALUES_OF:
        yield ".operator", f"must be one of {', '.join(VALUES_OF)}"
    elif VALUES_OF[operator] != bool(values):
        wanted = "must be given" if VALUES_OF[operator] else "must be empty"
        yield ".values", f"{wanted} where operator is {operator}"
    elif operator in {"Gt", "Lt"} and len(values) != 1:
        yield ".values", f"must be one number where operator is {operator}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pod_term(term: Object) -> list[Found]:
    why = "must be the key of a label of nodes"
    return when(_KEY.fullmatch(text(term, "topologyKey")) is None, ".topologyKey", why)


PREFERENCES = (
    _preferred("nodeAffinity", "preference", _preference),
    _preferred("podAffinity", "podAffinityTerm", _pod_term),
    _preferred("podAntiAffinity", "podAffinityTerm", _pod_term),
)


def preferred(spec: Object) -> Iterator[Found]:
    """Find problems of the weights and terms of preferred nodes and pods."""
    yield from (found for check in PREFERENCES for found in check(spec))


def ports(nic: Object) -> Iterator[Found]:
    """Find invalid and repeated ports of an interface."""
    twice = "is used twice; give each port a name of its own"
    odd = (index for index, one in enumerate(items(nic, "ports")) if at(one, "port") not in PORTS)
    yield from ((f".ports[{index}].port", "must be 1 to 65535") for index in odd)
    yield from ((f".{path}", twice) for path, _ in names_twice("ports")(nic))
