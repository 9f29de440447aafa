"""EndpointSlices for the guests that Services select.

Kubernetes' own controller (k8s.io/endpointslice) makes the slices for pods. The bridge writes only
its own slices. A proxy combines all slices of a Service.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from virtbus.kubebridge.core.runtime.controller import (
    ENDPOINT_SLICE,
    VMI,
    Action,
    Create,
    Delete,
    Key,
    RecordEvent,
    Replace,
    Requeue,
)
from virtbus.kubebridge.core.service.model import KubeService, Member, Slice, selected

MANAGER = "kubebridge.virtbus.io"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
SERVICE_NAME = "kubernetes.io/service-name"
HEADLESS = "service.kubernetes.io/headless"
SELECTOR = f"{MANAGED_BY}={MANAGER}"
"""The label selector that lists only the bridge's slices."""
MAX_ENDPOINTS = 100
"""Limit of endpoints in one slice, as in Kubernetes' own controller."""
RETRY_S = 5.0
"""Seconds after which the Service is reconciled again if a created slice has not appeared."""
FAMILIES = ("IPv4", "IPv6")
_VMI = {"apiVersion": VMI.api_version, "kind": VMI.kind}
_SLICE = {"apiVersion": ENDPOINT_SLICE.api_version, "kind": ENDPOINT_SLICE.kind}
UNRESOLVED = "UnresolvedPort"
"""Reason of the Event about a named target port. Ports of guests have no names."""


def reconcile(
    service: KubeService, members: Iterable[Member], slices: Iterable[Slice]
) -> list[Action]:
    """Return the needed writes. `slices` are the bridge's slices of this Service.

    An endpoint stays in its slice. A change of one guest therefore writes one slice of each family.
    """
    if service.deleting:
        return []
    early, chosen = service.early, selected(service, members)
    ports, unresolved = _ports(service)
    warns = [RecordEvent(UNRESOLVED, unresolved, warning=True)] if unresolved and chosen else []
    if unresolved and not ports:
        chosen = []
    existing = {one.name: one for one in slices}
    actions: list[Action] = []
    kept = set()
    for family in (one for one in FAMILIES if one in (service.families or FAMILIES[:1])):
        here = {one.uid: one for one in chosen if family in one.addresses}
        for name, uids in _spread(here, family, service.name, existing):
            kept.add(name)
            endpoints = [_endpoint(here[uid], family, early=early) for uid in uids]
            wanted = _slice(service, name, family, ports, endpoints)
            actions += _written(wanted, existing.get(name))
    actions += [
        Delete(Key(ENDPOINT_SLICE, service.namespace, name), one.uid)
        for name, one in existing.items()
        if name not in kept
    ]
    return [*actions, *warns]


# --- distribution over slices ------------------------------------------------------------------
def _spread(
    here: Mapping[str, Member], family: str, service: str, existing: Mapping[str, Slice]
) -> Iterator[tuple[str, list[str]]]:
    """Yield slice names with uids of guests. Existing endpoints stay; new endpoints fill gaps."""
    left = dict.fromkeys(sorted(here))
    stem = f"{service}-virtbus-{family.lower()}-"
    ends = (name.removeprefix(stem) for name in existing if name.startswith(stem))
    numbers = sorted(int(end) for end in ends if end.isdecimal() and end == str(int(end)))
    rows: dict[int, list[str]] = {}
    for number in numbers:
        uids = dict.fromkeys(one.uid for one in existing[f"{stem}{number}"].members)
        rows[number] = [uid for uid in uids if uid in left][:MAX_ENDPOINTS]
        for uid in rows[number]:
            left.pop(uid, None)
    number = 0
    for uid in left:
        while len(rows.setdefault(number, [])) >= MAX_ENDPOINTS:
            number += 1
        rows[number].append(uid)
    for number, placed in sorted(rows.items()):
        if placed:
            yield f"{stem}{number}", placed


# --- contents of a slice -----------------------------------------------------------------------
def _ports(service: KubeService) -> tuple[list[dict[str, Any]], str]:
    """Return the ports, and a warning about named target ports, which only pods have."""
    ports, odd = [], []
    for one in service.ports:
        if isinstance(one.target, str):
            odd.append(one.target)
            continue
        port = {
            "name": one.name,
            "protocol": one.protocol or "TCP",
            "port": one.target or one.port,
        }
        if one.app_protocol:
            port["appProtocol"] = one.app_protocol
        ports.append(port)
    names = ", ".join(sorted(odd))
    why = f"targetPort {names}: ports of a VirtualMachineInstance have no names; write a number"
    return ports, why if odd else ""


def _endpoint(one: Member, family: str, *, early: bool) -> dict[str, Any]:
    endpoint: dict[str, Any] = {
        "addresses": [one.addresses[family]],
        "conditions": {
            "ready": early or (one.ready and not one.terminating),
            "serving": one.ready,
            "terminating": one.terminating,
        },
        "targetRef": {
            **_VMI,
            "namespace": one.namespace,
            "name": one.name,
            "uid": one.uid,
        },
    }
    if one.node:
        endpoint["nodeName"] = one.node
    return endpoint


def _slice(
    service: KubeService,
    name: str,
    family: str,
    ports: list[dict[str, Any]],
    endpoints: list[dict[str, Any]],
) -> dict[str, Any]:
    labels = {SERVICE_NAME: service.name, MANAGED_BY: MANAGER}
    if service.cluster_ip in {"", "None"}:
        labels[HEADLESS] = ""
    return {
        **_SLICE,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": labels,
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "name": service.name,
                    "uid": service.uid,
                    "controller": True,
                }
            ],
        },
        "addressType": family,
        "ports": ports,
        "endpoints": endpoints,
    }


def _written(wanted: dict[str, Any], there: Slice | None) -> list[Action]:
    if there is None:
        return [Create(ENDPOINT_SLICE, wanted), Requeue(RETRY_S)]
    same = (
        there.labels == wanted["metadata"]["labels"],
        list(there.owners) == wanted["metadata"]["ownerReferences"],
        list(there.ports) == wanted["ports"],
        list(there.endpoints) == wanted["endpoints"],
    )
    if all(same):
        return []
    versioned = {**wanted["metadata"], "resourceVersion": there.version}
    return [Replace(ENDPOINT_SLICE, {**wanted, "metadata": versioned})]
