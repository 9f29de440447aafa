"""Computes the EndpointSlices of guests that Services select, in addition to those of pods.

Kubernetes' own controller (k8s.io/endpointslice) does the same for pods. The bridge does not touch
the slices of others. A proxy combines all slices of a Service.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from virtbus.kubebridge.core.objects.metadata import GROUP_VERSION, VMI_KIND
from virtbus.kubebridge.core.objects.plain import Object, at, items, part, text
from virtbus.kubebridge.core.runtime.actions import (
    Action,
    Create,
    Delete,
    RecordEvent,
    Replace,
    Requeue,
)
from virtbus.kubebridge.core.runtime.kinds import ENDPOINT_SLICE, Key
from virtbus.kubebridge.core.service.members import Member, selects

MANAGER = "kubebridge.virtbus.io"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
SERVICE_NAME = "kubernetes.io/service-name"
HEADLESS = "service.kubernetes.io/headless"
SELECTOR = f"{MANAGED_BY}={MANAGER}"
"""Selects the bridge's slices in a list."""
MAX_ENDPOINTS = 100
"""Endpoints of one slice, as in Kubernetes' own controller."""
RETRY_S = 5.0
"""Seconds before a retry if a created slice does not appear."""
FAMILIES = ("IPv4", "IPv6")
UNRESOLVED = "UnresolvedPort"
"""Reason of the Event about a port that guests cannot resolve."""


def reconcile(service: Object, members: Iterable[Member], slices: Iterable[Object]) -> list[Action]:
    """Return the writes that are needed. `slices` are the bridge's slices for this Service.

    An endpoint stays in its slice, so a change of one guest writes one slice.
    """
    if at(service, "metadata", "deletionTimestamp"):
        return []
    early = at(service, "spec", "publishNotReadyAddresses") is True
    chosen = [one for one in members if (one.running or early) and selects(service, one.labels)]
    ports, unresolved = _ports(service)
    warns = [RecordEvent(UNRESOLVED, unresolved, warning=True)] if unresolved and chosen else []
    if unresolved and not ports:
        chosen = []
    known = {text(one, "metadata", "name"): one for one in slices}
    space = text(service, "metadata", "namespace")
    actions: list[Action] = []
    kept = set()
    families = at(service, "spec", "ipFamilies") or FAMILIES[:1]
    for family in (one for one in FAMILIES if one in families):
        here = {one.uid: one for one in chosen if family in one.addresses}
        for name, uids in _spread(here, family, text(service, "metadata", "name"), known):
            kept.add(name)
            endpoints = [_endpoint(here[uid], family, early=early) for uid in uids]
            wanted = _slice(service, name, family, ports, endpoints)
            actions += _written(wanted, known.get(name))
    actions += [
        Delete(Key(ENDPOINT_SLICE, space, name), text(one, "metadata", "uid"))
        for name, one in known.items()
        if name not in kept
    ]
    return [*actions, *warns]


# --- distribution over slices ------------------------------------------------------------------
def _spread(
    here: Mapping[str, Member], family: str, service: str, known: Mapping[str, Object]
) -> Iterator[tuple[str, list[str]]]:
    """Yield slice names with their uids. Existing endpoints stay, new ones fill gaps."""
    left = dict.fromkeys(sorted(here))
    stem = f"{service}-virtbus-{family.lower()}-"
    numbers = sorted(
        int(name.removeprefix(stem))
        for name in known
        if name.startswith(stem) and name.removeprefix(stem).isdecimal()
    )
    rows: dict[int, list[str]] = {}
    for number in numbers:
        there = items(known[f"{stem}{number}"], "endpoints")
        uids = dict.fromkeys(text(one, "targetRef", "uid") for one in there)
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
def _ports(service: Object) -> tuple[list[dict[str, Any]], str]:
    """Return the ports, and a warning about named target ports, which only pods have."""
    ports, odd = [], []
    for one in items(service, "spec", "ports"):
        target = at(one, "targetPort")
        if isinstance(target, str):
            odd.append(target)
            continue
        port = {
            "name": text(one, "name"),
            "protocol": text(one, "protocol") or "TCP",
            "port": target or at(one, "port"),
        }
        if protocol := text(one, "appProtocol"):
            port["appProtocol"] = protocol
        ports.append(port)
    names = ", ".join(sorted(odd))
    why = f"targetPort {names}: ports of a VirtualMachineInstance have no names; write a number"
    return ports, why if odd else ""


def _endpoint(one: Member, family: str, *, early: bool) -> dict[str, Any]:
    said: dict[str, Any] = {
        "addresses": [one.addresses[family]],
        "conditions": {
            "ready": early or (one.ready and not one.terminating),
            "serving": one.ready,
            "terminating": one.terminating,
        },
        "targetRef": {
            "apiVersion": GROUP_VERSION,
            "kind": VMI_KIND,
            "namespace": one.namespace,
            "name": one.name,
            "uid": one.uid,
        },
    }
    if one.node:
        said["nodeName"] = one.node
    return said


def _slice(
    service: Object,
    name: str,
    family: str,
    ports: list[dict[str, Any]],
    endpoints: list[dict[str, Any]],
) -> dict[str, Any]:
    labels = {SERVICE_NAME: text(service, "metadata", "name"), MANAGED_BY: MANAGER}
    if text(service, "spec", "clusterIP") in {"", "None"}:
        labels[HEADLESS] = ""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": text(service, "metadata", "namespace"),
            "labels": labels,
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "name": text(service, "metadata", "name"),
                    "uid": text(service, "metadata", "uid"),
                    "controller": True,
                }
            ],
        },
        "addressType": family,
        "ports": ports,
        "endpoints": endpoints,
    }


def _written(wanted: dict[str, Any], there: Object | None) -> list[Action]:
    if there is None:
        return [Create(ENDPOINT_SLICE, wanted), Requeue(RETRY_S)]
    if _shown(there) == _shown(wanted):
        return []
    version = text(there, "metadata", "resourceVersion")
    versioned = {**wanted["metadata"], "resourceVersion": version}
    return [Replace(ENDPOINT_SLICE, {**wanted, "metadata": versioned})]


def _shown(one: Object) -> tuple[Any, ...]:
    """Return the parts of a slice that the bridge writes. Empty lists come back as missing."""
    meta = part(one, "metadata")
    parts = (meta.get("labels"), meta.get("ownerReferences"), one.get("ports") or [])
    return (*parts, one.get("endpoints") or [])
