"""Joins the conditions of the node's runtimes, and adds a condition for each runtime.

kubelet reads only RuntimeReady and NetworkReady. The proxy takes both from the runtime of
containers, so the Node stays Ready while VM pods cannot be served. The added conditions show which
runtime is not ready.
"""

from collections.abc import Mapping
from typing import NamedTuple

from virtbus.criproxy.core.routing import CONTAINERS, Name

RUNTIME, NETWORK = "RuntimeReady", "NetworkReady"
KUBELETS = (RUNTIME, NETWORK)
"""The conditions that kubelet reads."""
OWN = "virtbus.io/Runtime-"
"""The beginning of a condition's type; the runtime's name follows."""


class Condition(NamedTuple):
    """One condition, with the fields that it has in CRI."""

    type: str
    status: bool
    reason: str = ""
    message: str = ""


class Seen(NamedTuple):
    """The state of a runtime: the conditions in its last answer, by type.

    `away` is the reason why the runtime does not answer; empty if it answers.
    """

    told: Mapping[str, Condition]
    away: str = ""


def merged(seen: Mapping[Name, Seen]) -> list[Condition]:
    """Return kubelet's conditions, the added condition of each runtime, and all other conditions.

    If a runtime does not answer, its other conditions are left out: they may be outdated.
    """
    return [
        *_kubelets(seen[CONTAINERS]),
        *(_own(name, one) for name, one in seen.items()),
        *(
            told
            for one in seen.values()
            for kind, told in one.told.items()
            if kind not in KUBELETS and not one.away
        ),
    ]


def _kubelets(one: Seen) -> list[Condition]:
    if one.away:
        return [Condition(kind, status=False, reason="Away", message=one.away) for kind in KUBELETS]
    return [one.told[kind] for kind in KUBELETS if kind in one.told]


def _own(name: Name, one: Seen) -> Condition:
    kind = f"{OWN}{name}"
    if one.away:
        said = f"{one.away}; its last lists and statuses are served"
        return Condition(kind, status=False, reason="Away", message=said)
    for part in KUBELETS:
        told = one.told.get(part)
        if told is None or not told.status:
            reason, message = (told.reason, told.message) if told else ("", "")
            why = ": ".join(text for text in (part, reason, message) if text)
            return Condition(kind, status=False, reason="NotReady", message=f"not {why}")
    return Condition(kind, status=True)
