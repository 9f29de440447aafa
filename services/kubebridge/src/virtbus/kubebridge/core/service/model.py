"""Fields of Services and EndpointSlices that the bridge reads, and the guests as their members.

Services select a guest by the labels that its pod in KubeVirt would have. The guest's addresses
come from virtbus.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.metadata import VM_LABEL
from virtbus.kubebridge.core.objects.unstructured import Object, path
from virtbus.kubebridge.core.vmi.model import FINAL, Vmi, VmiPhase
from virtbus.kubebridge.core.vmi.status import READY, TERMINATING, holds
from virtbus.schemas.network import InterfaceStatus


@dataclass(frozen=True, slots=True)
class ServicePort:
    """A port of a Service. `target` is a number, or the name of a pod's port."""

    name: str = path("name")
    protocol: str = path("protocol")
    port: int = path("port")
    target: Any = path("targetPort")
    app_protocol: str = path("appProtocol")


@dataclass(frozen=True, slots=True)
class KubeService:
    """A Service."""

    name: str = path("metadata", "name")
    namespace: str = path("metadata", "namespace")
    uid: str = path("metadata", "uid")
    deleting: bool = path("metadata", "deletionTimestamp")
    type: str = path("spec", "type")
    selector: Object = path("spec", "selector")
    ports: tuple[ServicePort, ...] = path("spec", "ports")
    families: tuple[str, ...] = path("spec", "ipFamilies")
    cluster_ip: str = path("spec", "clusterIP")
    early: bool = path("spec", "publishNotReadyAddresses")


@dataclass(frozen=True, slots=True)
class SliceEndpoint:
    """An endpoint of a slice."""

    uid: str = path("targetRef", "uid")


@dataclass(frozen=True, slots=True)
class Slice:
    """An EndpointSlice. `members` are the guests of its endpoints."""

    name: str = path("metadata", "name")
    uid: str = path("metadata", "uid")
    version: str = path("metadata", "resourceVersion")
    labels: Object = path("metadata", "labels")
    owners: tuple[Object, ...] = path("metadata", "ownerReferences")
    ports: tuple[Object, ...] = path("ports")
    endpoints: tuple[Object, ...] = path("endpoints")
    members: tuple[SliceEndpoint, ...] = path("endpoints")


class Member(NamedTuple):
    """A guest that Services may select. `addresses` has one address for each IP family.

    `labels` has the VMI's labels and the labels that KubeVirt gives the VMI's pod.

    Addresses come from virtbus only. An address that the guest reports could direct a Service's
    traffic to any host.
    """

    namespace: str
    name: str
    uid: str
    node: str
    labels: Mapping[str, str]
    addresses: Mapping[str, str]
    running: bool
    ready: bool
    terminating: bool


def member(vmi: Vmi, interfaces: Iterable[InterfaceStatus]) -> Member | None:
    """Return the VMI as a member; None if the VMI has no address or has ended."""
    addresses = _addresses(interfaces)
    if vmi.phase in FINAL or not addresses:
        return None
    labels = {key: value for key, value in vmi.labels.items() if isinstance(value, str)}
    labels |= {
        "kubevirt.io": "virt-launcher",
        "kubevirt.io/created-by": vmi.uid,
        "vmi.kubevirt.io/id": vmi.name,
        VM_LABEL: vmi.name,
    }
    return Member(
        vmi.namespace,
        vmi.name,
        vmi.uid,
        vmi.node,
        labels,
        addresses,
        vmi.phase in {VmiPhase.RUNNING, VmiPhase.UNKNOWN},
        holds(vmi, READY) or holds(vmi, READY, on=False, reason=TERMINATING),
        vmi.deleting,
    )


def _addresses(interfaces: Iterable[InterfaceStatus]) -> dict[str, str]:
    """Return one address of each family, all from one interface.

    The interface is the first with addresses. Interfaces of the pod network have precedence.
    """
    addressed = [one for one in interfaces if one.addresses]
    of_pod = [one for one in addressed if one.network == "default"]
    found: dict[str, str] = {}
    for one in (of_pod or addressed)[:1]:
        for text_ in one.addresses:
            try:
                address = ipaddress.ip_interface(text_).ip
            except ValueError:  # nodes are not trusted to report valid addresses
                continue
            if not (address.is_link_local or address.is_loopback or address.is_unspecified):
                found.setdefault(f"IPv{address.version}", str(address))
    return found


def selected(service: KubeService, members: Iterable[Member]) -> list[Member]:
    """Return the guests of a Service: those that run, and with `service.early` all others, too."""
    there = (one for one in members if one.running or service.early)
    return [one for one in there if selects(service, one.labels)]


def selects(service: KubeService, labels: Mapping[str, str]) -> bool:
    """Return True if the Service has a selector that matches the labels."""
    matches = all(labels.get(key) == value for key, value in service.selector.items())
    return bool(service.selector) and matches and service.type != "ExternalName"
