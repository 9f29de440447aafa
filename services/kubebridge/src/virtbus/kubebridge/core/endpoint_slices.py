"""EndpointSlices of guests that Services select, in addition to those of pods.

Users know Kubernetes' own controller (k8s.io/endpointslice); ours does the same, except for pods.
Foreign slices are not touched. A proxy uses all slices of a Service together.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from virtbus.kubebridge.core.metadata import GROUP_VERSION, VMI_KIND
from virtbus.kubebridge.core.plain import Object, at, items, part, text
from virtbus.kubebridge.core.service_members import Member, selects

MANAGER = "kubebridge.virtbus.io"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
SERVICE_NAME = "kubernetes.io/service-name"
HEADLESS = "service.kubernetes.io/headless"
SELECTOR = f"{MANAGED_BY}={MANAGER}"
"""Of a list of our slices."""
MAX_ENDPOINTS = 100
"""In a slice, as Kubernetes' own controller has it."""
FAMILIES = ("IPv4", "IPv6")
UNRESOLVED = "UnresolvedPort"
"""The reason of an Event."""


@dataclass(frozen=True, slots=True)
class CreateSlice:
    """One of that name which is there already is looked at next."""

    slice: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplaceSlice:
    """At the resource version that was read."""

    slice: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteSlice:
    """If it is still the one of this uid."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Warn:
    """An Event on the Service, of type Warning; the same again is told once."""

    reason: str
    message: str


SliceAction = CreateSlice | ReplaceSlice | DeleteSlice | Warn


def reconcile(
    service: Object, members: Iterable[Member], slices: Iterable[Object]
) -> list[SliceAction]:
    """What is to be done; nothing where all is told. `slices` are ours, of this Service's name.

    A slice's endpoints stay in it, so that a change of one guest writes one slice.
    """
    if at(service, "metadata", "deletionTimestamp"):
        return []
    early = at(service, "spec", "publishNotReadyAddresses") is True
    chosen = [one for one in members if (one.running or early) and selects(service, one.labels)]
    ports, unresolved = _ports(service)
    warns = [Warn(UNRESOLVED, unresolved)] if unresolved and chosen else []
    if unresolved and not ports:
        chosen = []
    known = {text(one, "metadata", "name"): one for one in slices}
    actions: list[SliceAction] = []
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
        DeleteSlice(name, text(one, "metadata", "uid"))
        for name, one in known.items()
        if name not in kept
    ]
    return [*actions, *warns]


# --- which goes where --------------------------------------------------------------------------
def _spread(
    here: Mapping[str, Member], family: str, service: str, known: Mapping[str, Object]
) -> Iterator[tuple[str, list[str]]]:
    """Names of slices and the uids in each: where they are already, then where there is room."""
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


# --- what is in one ----------------------------------------------------------------------------
def _ports(service: Object) -> tuple[list[dict[str, Any]], str]:
    """The ports of guests, and what is to be said of those that only a pod could name."""
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
    why = f"targetPort {names}: the ports of a VirtualMachineInstance have no names; write a number"
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


def _written(wanted: dict[str, Any], there: Object | None) -> list[SliceAction]:
    if there is None:
        return [CreateSlice(wanted)]
    if _shown(there) == _shown(wanted):
        return []
    version = text(there, "metadata", "resourceVersion")
    return [
        ReplaceSlice({**wanted, "metadata": {**wanted["metadata"], "resourceVersion": version}})
    ]


def _shown(one: Object) -> tuple[Any, ...]:
    """What of a slice is ours to say; lists that are empty come back as none."""
    meta = part(one, "metadata")
    parts = (meta.get("labels"), meta.get("ownerReferences"), one.get("ports") or [])
    return (*parts, one.get("endpoints") or [])
