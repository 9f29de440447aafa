"""Guests as Services see them: by KubeVirt's labels of pods, and the addresses virtbus gave."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from virtbus.kubebridge.core.metadata import VM_LABEL
from virtbus.kubebridge.core.phases import FINAL, Phase
from virtbus.kubebridge.core.plain import Object, at, part, text
from virtbus.kubebridge.core.vmi_status import READY, TERMINATING, holds
from virtbus.schemas.network import InterfaceStatus


class Member(NamedTuple):
    """A guest that Services may select; `addresses` are those that virtbus gave it, by family.

    What a guest says of its own addresses counts for nothing here: it could take the traffic of
    a Service to wherever it likes.
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


def member(vmi: Object, interfaces: Iterable[InterfaceStatus]) -> Member | None:
    """The VMI as Services see it; None where it has no address, or has ended."""
    phase = text(vmi, "status", "phase")
    addresses = _addresses(interfaces)
    if phase in FINAL or not addresses:
        return None
    name, uid = text(vmi, "metadata", "name"), text(vmi, "metadata", "uid")
    return Member(
        text(vmi, "metadata", "namespace"),
        name,
        uid,
        text(vmi, "status", "nodeName"),
        labels_of(part(vmi, "metadata", "labels"), name, uid),
        addresses,
        phase in {Phase.RUNNING, Phase.UNKNOWN},
        holds(vmi, READY) or holds(vmi, READY, on=False, reason=TERMINATING),
        bool(at(vmi, "metadata", "deletionTimestamp")),
    )


def labels_of(labels: Object, name: str, uid: str) -> dict[str, str]:
    """Those of a VMI, and those that KubeVirt gives the pod of one: Services select by them."""
    own = {key: value for key, value in labels.items() if isinstance(value, str)}
    return own | {
        "kubevirt.io": "virt-launcher",
        "kubevirt.io/created-by": uid,
        "vmi.kubevirt.io/id": name,
        VM_LABEL: name,
    }


def _addresses(interfaces: Iterable[InterfaceStatus]) -> dict[str, str]:
    """One of each family: of the pod network's interface, or else of the first that has any."""
    known = [one for one in interfaces if one.addresses]
    of_pod = [one for one in known if one.network == "default"]
    found: dict[str, str] = {}
    for one in (of_pod or known)[:1]:
        for text_ in one.addresses:
            try:
                address = ipaddress.ip_interface(text_).ip
            except ValueError:  # a node may say anything
                continue
            if not (address.is_link_local or address.is_loopback or address.is_unspecified):
                found.setdefault(f"IPv{address.version}", str(address))
    return found


def selects(service: Object, labels: Mapping[str, str]) -> bool:
    """True where the Service's selector, if it has one, matches the labels."""
    if text(service, "spec", "type") == "ExternalName":
        return False
    selector = part(service, "spec", "selector")
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())
