"""Chooses the networks of a pod's VM, each with one NIC. The first NIC has the pod's address.

The default is the network in the node's settings. Networks in the annotation of CNI Genie replace
the default. Networks in the annotation of Multus are added. Both annotations name networks of the
bus: network objects, or conflists that the node offers.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from virtbus.schemas.errors import Detail, VirtbusError
from virtbus.schemas.ids import is_id
from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.publish import PublishedPort
from virtbus.schemas.vm import Interface, Network

GENIE, MULTUS = "cni", "k8s.v1.cni.cncf.io/networks"
NIC = "default"
"""The name of the first NIC. The next NICs are `net1`, `net2`, …, as in Multus."""


class PodNetwork(NamedTuple):
    """A network of a pod, and the annotation that names it. The default network has none."""

    name: str
    annotation: str = ""


def pod_networks(annotations: Mapping[str, str], of_node: str) -> tuple[PodNetwork, ...]:
    """Return the pod's networks in the order of its NICs."""
    named = [PodNetwork(name, GENIE) for name in _names(annotations, GENIE)]
    more = [PodNetwork(name, MULTUS) for name in _names(annotations, MULTUS)]
    return (*(named or [PodNetwork(of_node)]), *more)


def _names(annotations: Mapping[str, str], key: str) -> list[str]:
    text = annotations.get(key, "").strip()
    return [name.strip() for name in text.split(",")] if text else []


def problems(annotations: Mapping[str, str]) -> Iterator[Detail]:
    """Yield the problems of the annotations: invalid names, or too many networks."""
    for key in (GENIE, MULTUS):
        wrong = [name for name in _names(annotations, key) if not is_id(name)]
        if wrong:
            message = (
                f"{key} must have names of networks with commas between them: {wrong[0]!r:.80}"
            )
            yield Detail(path=f"annotations.{key}", message=message)
    if len(pod_networks(annotations, NIC)) > NICS_MAX:
        key = MULTUS if annotations.get(MULTUS) else GENIE
        message = f"{key} makes more than {NICS_MAX} NICs; name fewer networks"
        yield Detail(path=f"annotations.{key}", message=message)


def interfaces(
    wanted: tuple[PodNetwork, ...], published: tuple[PublishedPort, ...]
) -> tuple[Interface, ...]:
    """Return the NICs. The host's published ports lead to the first NIC."""
    first, *more = _nics(wanted)
    return (Interface(name=first, publish=published), *(Interface(name=name) for name in more))


def networks(wanted: tuple[PodNetwork, ...]) -> tuple[Network, ...]:
    """Return the networks of the VM's spec, each with the name of its NIC."""
    return tuple(
        Network(name=nic, network=one.name) for nic, one in zip(_nics(wanted), wanted, strict=True)
    )


def _nics(wanted: tuple[PodNetwork, ...]) -> list[str]:
    return [NIC, *(f"net{at}" for at in range(1, len(wanted)))]


def explained(error: VirtbusError, annotations: Mapping[str, str]) -> VirtbusError:
    """Return a refusal of networks that names the pod's annotations in place of the VM's fields."""
    message, details = error.body.message, error.body.details
    for at, network in enumerate(pod_networks(annotations, NIC)):
        field, path = f"spec.networks[{at}].network", f"annotations.{network.annotation}"
        if network.annotation:
            message = message.replace(field, path)
            details = tuple(
                one.model_copy(update={"path": path}) if one.path == field else one
                for one in details
            )
    changed = {"message": message, "details": details}
    return VirtbusError.of(error.body.model_copy(update=changed))
