"""Fields of NetworkPolicies that `translation` reads."""

from dataclasses import dataclass
from typing import Any

from virtbus.kubebridge.core.objects.unstructured import Object, path


@dataclass(frozen=True, slots=True)
class Requirement:
    """An expression of a label selector."""

    key: str = path("key")
    operator: str = path("operator")
    values: tuple[str, ...] = path("values")


@dataclass(frozen=True, slots=True)
class Selector:
    """A label selector. Both fields are empty if the selector is missing or selects everything."""

    labels: Object = path("matchLabels")
    expressions: tuple[Requirement, ...] = path("matchExpressions")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer of a rule. A selector is None if the peer does not have it."""

    cidr: str = path("ipBlock", "cidr")
    excepted: tuple[str, ...] = path("ipBlock", "except")
    pods: Any = path("podSelector")
    namespaces: Any = path("namespaceSelector")


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a rule: a number, the name of a pod's port, or None for all."""

    protocol: str = path("protocol")
    port: Any = path("port")
    end: int = path("endPort")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. Ingress uses `sources`; egress uses `destinations`."""

    ports: tuple[Port, ...] = path("ports")
    sources: tuple[Peer, ...] = path("from")
    destinations: tuple[Peer, ...] = path("to")


@dataclass(frozen=True, slots=True)
class Policy:
    """A NetworkPolicy. A missing list of rules reads as empty. `types` names the directions."""

    name: str = path("metadata", "name")
    namespace: str = path("metadata", "namespace")
    uid: str = path("metadata", "uid")
    deleting: bool = path("metadata", "deletionTimestamp")
    pods: Selector = path("spec", "podSelector")
    types: tuple[str, ...] = path("spec", "policyTypes")
    ingress: tuple[Rule, ...] = path("spec", "ingress")
    egress: tuple[Rule, ...] = path("spec", "egress")
