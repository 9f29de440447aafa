"""Defines the stored state of the node, and derives CRI's conditions from this state.

An unreachable bus does not change the conditions RuntimeReady and NetworkReady, because kubelet
must not treat the node as dead. Only the condition BUS becomes false.
"""

from typing import Any

from virtbus.cri.core.stored_record import StoredRecord
from virtbus.cri.core.vm_request import HOSTNAME
from virtbus.schemas.node import NodeState, NodeView

BUS = "virtbus.io/BusConnected"
"""The type of the condition for the connection to the bus. kubelet ignores this condition."""
RUNTIME, NETWORK = "RuntimeReady", "NetworkReady"
SERVICES = {RUNTIME: "imaged", NETWORK: "netd"}
"""By condition: the service on the node that must be ready, in addition to the agent."""

SERVING = frozenset({NodeState.READY, NodeState.DRAINING})
"""States of the node in which pods run. A drain moves no VM of a pod: Kubernetes drains its nodes
itself."""


class KnownNode(StoredRecord):
    """The node's state at the last answer of the bus, stored for restarts of virtbus-cri.

    `problems` has a message for each condition that is false, by type of the condition.
    """

    hostname: str
    problems: dict[str, str]


def known(view: NodeView) -> KnownNode:
    """Return the state to store from a node's view."""
    problems = {}
    for kind, name in SERVICES.items():
        service = view.services.get(name)
        if service is not None and service.state is not NodeState.READY:
            problems[kind] = service.message or f"{name} is {service.state}"
    if view.state not in SERVING and not problems:
        problems[RUNTIME] = f"the node is {view.state}; see `virtbus status`"
    return KnownNode(hostname=view.labels.get(HOSTNAME, view.node), problems=problems)


def conditions(node: KnownNode | None, bus_problem: str) -> list[dict[str, Any]]:
    """Return CRI's conditions. `bus_problem` is empty while the bus is connected."""
    if node is None:
        why = f"the node has not joined the bus yet: {bus_problem or 'no answer yet'}"
        found = [_condition(kind, "NodeUnknown", why) for kind in SERVICES]
    else:
        found = [_condition(kind, "NotReady", node.problems.get(kind, "")) for kind in SERVICES]
    away = f"{bus_problem}; the last known state is served" if bus_problem else ""
    return [*found, _condition(BUS, "BusAway", away)]


def _condition(kind: str, reason: str, problem: str) -> dict[str, Any]:
    reason = reason if problem else ""
    return {"type": kind, "status": not problem, "reason": reason, "message": problem}
