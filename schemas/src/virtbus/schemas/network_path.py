"""The path of a guest's packets on its host, and what is broken on it."""

from operator import not_
from typing import Literal

from pydantic import Field

from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.security_group import Direction


class NetworkAsk(StrictModel):
    """`rpc.agent.network`, `rpc.netd.path`: describe a VM's network; with `check`, test it."""

    uid: str
    check: bool = False


class NicPath(LenientModel):
    """The links between an interface and its network, from the guest outwards.

    `status.tap`, `bridge` and `link` are in the VM's namespace. `host_link` is the other end of
    `link`.
    """

    status: InterfaceStatus
    kind: str
    """`bridge`: the built-in network. `nat`, `routed`, `isolated`, `overlay`: a network object of
    this kind. `host-bridge`: an existing Linux bridge of the host. `macvtap`: `link` is on an
    interface of the host. `cni`: plugins made `link`."""
    bridge: str
    link: str
    host_link: str = ""
    host_bridge: str = ""
    plugins: tuple[str, ...] = ()
    """The types of the network's CNI plugins, in order."""
    limits: dict[str, int] = Field(default_factory=dict)
    """The rate limits in bytes per second, by direction: `to guest`, `from guest`."""
    ports: tuple[str, ...] = Field((), exclude_if=not_)
    """With masquerade and passt: the declared ports (`80/tcp`). If there are none, all ports lead
    to the guest."""
    leased: bool = Field(False, exclude_if=not_)
    """True if the DHCP server of the segment, and not netd, gives the interface its address."""
    isolated: tuple[Direction, ...] = ()
    """The directions in which the interface has only connections that a security group allows."""


class PathFault(LenientModel):
    """A fault, and the next step. `interface` is empty if the fault concerns all interfaces."""

    interface: str = ""
    what: str
    next_step: str


class NetworkView(LenientModel):
    """The network of a VM on its node. `faults` is None if the network was not tested."""

    uid: str
    node: str = ""
    netns: str = ""
    state: Literal["none", "failed", "ready"] = "none"
    guest_runs: bool = False
    subnet: str = ""
    """The subnet of the node's built-in network."""
    gateway: str = ""
    zone: str = ""
    """The domain of VMs' names; empty if VMs have no names."""
    groups: tuple[str, ...] = ()
    """The security groups that select the VM."""
    interfaces: tuple[NicPath, ...] = ()
    faults: tuple[PathFault, ...] | None = None
