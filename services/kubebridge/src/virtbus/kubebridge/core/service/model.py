"""Declares the fields of Services and EndpointSlices that rules read."""

from dataclasses import dataclass
from typing import Any

from virtbus.kubebridge.core.objects.plain import Object
from virtbus.kubebridge.core.objects.typed import at


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a Service. `target` is a number, or the name of a pod's port."""

    name: str = at("name")
    protocol: str = at("protocol")
    port: int = at("port")
    target: Any = at("targetPort")
    app_protocol: str = at("appProtocol")


@dataclass(frozen=True, slots=True)
class Service:
    """A Service."""

    name: str = at("metadata", "name")
    namespace: str = at("metadata", "namespace")
    uid: str = at("metadata", "uid")
    deleting: bool = at("metadata", "deletionTimestamp")
    type: str = at("spec", "type")
    selector: Object = at("spec", "selector")
    ports: tuple[Port, ...] = at("spec", "ports")
    families: tuple[str, ...] = at("spec", "ipFamilies")
    cluster_ip: str = at("spec", "clusterIP")
    early: bool = at("spec", "publishNotReadyAddresses")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of a slice."""

    uid: str = at("targetRef", "uid")


@dataclass(frozen=True, slots=True)
class Slice:
    """An EndpointSlice. `members` are the guests of its endpoints."""

    name: str = at("metadata", "name")
    uid: str = at("metadata", "uid")
    version: str = at("metadata", "resourceVersion")
    labels: Object = at("metadata", "labels")
    owners: tuple[Object, ...] = at("metadata", "ownerReferences")
    ports: tuple[Object, ...] = at("ports")
    endpoints: tuple[Object, ...] = at("endpoints")
    members: tuple[Endpoint, ...] = at("endpoints")
