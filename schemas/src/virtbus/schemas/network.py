"""A VM's network, as services describe it to each other."""

import hashlib
from enum import StrEnum
from operator import not_
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.model import LenientModel


def check_mac(text: str) -> str:
    """Return the unicast MAC in lower case, or raise ValueError (NET-05)."""
    lowered = text.lower()
    octets = lowered.split(":")
    if len(octets) != 6 or any(
        len(o) != 2 or not set(o) <= set("0123456789abcdef") for o in octets
    ):
        msg = "must be a MAC address such as 02:00:5e:10:00:01"
        raise ValueError(msg)
    if int(octets[0], 16) & 1 or lowered == "00:00:00:00:00:00":
        msg = "must be a unicast MAC address, not a multicast, broadcast or zero one"
        raise ValueError(msg)
    return lowered


def guest_mac(uid: str, name: str) -> str:
    """Return the MAC of the interface `name` of a VM, if its spec has none.

    The MAC depends on no other interface, so it stays if another interface is removed.
    """
    digest = hashlib.sha256(f"guest/{uid}/{name}".encode()).digest()
    return "02:" + digest[:5].hex(":")


Mac = Annotated[str, StringConstraints(max_length=17), AfterValidator(check_mac)]


class LinkState(StrEnum):
    """The link of an interface: up, or without a carrier."""

    UP = "up"
    DOWN = "down"


class NetworkState(StrEnum):
    """The desired state of a VM's network on its node while the VM is off; set by its spec.

    The condition `NetworkReady` shows whether the node has brought the network to this state.
    """

    HELD = "Held"
    """The node keeps the network. The container runtime of a node may create a VM in this state
    without disks, and add the disks by a second create."""
    RELEASED = "Released"
    """The VM has no network, and cannot be started."""


class PlugState(StrEnum):
    """The state of an interface that was added to a running guest, or removed from it."""

    PLUGGED = "plugged"
    WAITING = "waiting"
    """The interface's network is made, and the guest does not have the device yet."""
    LEAVING = "leaving"
    """The record does not have the interface any more, and the guest still has the device."""


class InterfaceStatus(LenientModel):
    """One attached interface. `addresses` are CIDR strings; `tap` is a device in `netns`."""

    name: str
    network: str = "default"
    mac: str
    addresses: tuple[str, ...] = ()
    gateway: str = ""
    gateway6: str = Field("", exclude_if=not_)
    mtu: int = 1500
    queues: int = 1
    state: LinkState = LinkState.UP
    published: tuple[str, ...] = ()
    """Ports of the host that lead to the guest: `0.0.0.0:8080->80/tcp`."""
    tap: str = ""
    netns: str = ""
    binding: str = Field("", exclude_if=not_)
    """The binding in the spec; empty: bridge."""
    guest_addresses: tuple[str, ...] = Field((), exclude_if=not_)
    """With masquerade: the addresses that the guest itself has."""
    plug: PlugState = Field(PlugState.PLUGGED, exclude_if=lambda plug: plug is PlugState.PLUGGED)


class NetworkInfo(LenientModel):
    """A network that a node offers."""

    name: str
    kind: str
    namespaces: tuple[str, ...] = ()
    """VM namespaces that may use the network, or `*` for all. All may use the network `default`."""
    subnet: str = ""
    subnet6: str = ""
    detail: dict[str, str] = Field(default_factory=dict)
