"""The network of one VM, which is also the format of its state file."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pydantic import Field

from virtbus.netd.core import names
from virtbus.netd.core.guest_ends import GuestEnds, ends_of
from virtbus.schemas.dns import DnsConfig
from virtbus.schemas.guest_network import GUEST_NETWORK, GUEST_NETWORK6
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel
from virtbus.schemas.network import InterfaceStatus, LinkState, PlugState
from virtbus.schemas.network_object import BUILT_IN, ON_SEGMENTS, NetworkKind, NetworkTarget
from virtbus.schemas.nic import NicBinding, NicLimits
from virtbus.schemas.publish import GuestPort, PublishedPort


class NicKind(StrEnum):
    """The kind of network to which an interface is connected."""

    BRIDGE = "bridge"
    """The built-in path: a veth to the host bridge."""
    NAT = "nat"
    ROUTED = "routed"
    ISOLATED = "isolated"
    """NAT, ROUTED and ISOLATED: as BRIDGE, but with the bridge and rules of a network object."""
    OVERLAY = "overlay"
    """As NAT, with a tunnel to other hosts as a port of the bridge."""
    HOST_BRIDGE = "host-bridge"
    """A veth to an existing bridge of the host, which a network object of kind `bridge` names."""
    MACVTAP = "macvtap"
    """A macvlan link on an interface of the host."""
    CNI = "cni"
    """A link that the plugins of a conflist make."""

    @classmethod
    def of(cls, kind: NetworkKind) -> "NicKind":
        return cls.HOST_BRIDGE if kind is NetworkKind.BRIDGE else cls(kind)


WITH_NAMES = frozenset({NicKind.BRIDGE, NicKind.NAT, NicKind.ROUTED, NicKind.OVERLAY})
"""Kinds whose gateway resolves names of VMs."""


class Route(LenientModel):
    """A route for the guest. If `gateway` is empty, the destination is on the link itself."""

    destination: str
    gateway: str = ""


class CniState(LenientModel):
    """The input of a CNI DEL. It is stored, because the configuration may change later (NET-11)."""

    conflist: dict[str, Any]
    source: str = ""
    """The text of the conflist, until ADD. After ADD, only the file in `CniCache` has the text."""
    result: dict[str, Any] | None = None


class Nic(LenientModel):
    """One interface. Addresses (`10.0.0.5/16`) are empty until they are assigned."""

    index: int
    """The number in the names of its links. It stays when other interfaces are removed."""
    position: int = 0
    """The interface's position in the record."""
    name: str
    network: str
    kind: NicKind
    mac: str
    host_link: str
    asked: tuple[str, ...] = ()
    """The addresses in the record: claimed addresses, or those that the spec names."""
    addresses: tuple[str, ...] = ()
    gateway: str = ""
    gateway6: str = ""
    router6: str = ""
    """With CNI: the link-local address of the router `gateway6`, if known.

    A guest uses this address for its default route.
    """
    mtu: int = 1500
    asked_mtu: int = 0
    """The MTU in the record; 0 if the network's MTU applies."""
    queues: int = 1
    state: LinkState = LinkState.UP
    limits: NicLimits | None = None
    publish: tuple[PublishedPort, ...] = ()
    binding: NicBinding | None = None
    ports: tuple[GuestPort, ...] = ()
    """With masquerade or passt: the open ports. If empty, all ports are open."""
    guest_network: str = GUEST_NETWORK
    guest_network6: str = GUEST_NETWORK6
    """With masquerade: the guest's own networks. `addresses` then belong to the VM's namespace."""
    routes: tuple[Route, ...] = ()
    dns: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    cni: CniState | None = None
    plugins_digest: str = ""
    """The digest of the plugins that the conflist must have. Empty permits any plugins."""
    plugin_args: dict[str, str] = Field(default_factory=dict)
    """Further arguments in CNI_ARGS, which name the pod of a VM pod."""
    asks_segment: bool = False
    """True if the conflist has the plugin `dhcp`. netd does not run this plugin: the guest itself
    sends requests to the DHCP server."""
    on_macvlan: bool = False
    """True if the plugins made a macvlan link. A macvlan takes frames only for its own MAC, so the
    link has the guest's MAC."""
    off_host: bool = False
    """True if the host sees no packets of the link that the plugins made. An example is a device
    that the plugins moved into the namespace."""
    target: NetworkTarget | None = None
    """The network object; None for the built-in network, and for a conflist of the node."""
    pending: bool = False
    """True if a running guest does not have the interface yet, or has released it. The interface
    may then have no links."""
    leaving: bool = False
    """True if the record no longer has the interface, but a running guest may still use it."""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.network

    @property
    def path(self) -> str:
        return f"spec.domain.devices.interfaces[{self.position}]"

    @property
    def network_path(self) -> str:
        return f"spec.networks[{self.position}].network"

    @property
    def plug(self) -> PlugState:
        if self.leaving:
            return PlugState.LEAVING
        return PlugState.WAITING if self.pending else PlugState.PLUGGED

    @property
    def addresses4(self) -> tuple[str, ...]:
        return tuple(address for address in self.addresses if ":" not in address)

    @property
    def addresses6(self) -> tuple[str, ...]:
        return tuple(address for address in self.addresses if ":" in address)

    @property
    def published(self) -> tuple[str, ...]:
        has = {4: self.addresses4 or not self.addresses, 6: self.addresses6}
        versions = [version for version, given in has.items() if given]
        return tuple(text for port in self.publish for text in port.shown(versions))

    @property
    def place(self) -> str:
        return self.target.uid if self.target is not None else ""

    @property
    def is_translated(self) -> bool:
        return self.binding is NicBinding.MASQUERADE

    @property
    def guest_ends(self) -> tuple[GuestEnds, ...]:
        if not self.is_translated:
            return ()
        four = (self.guest_network,) if self.addresses4 or not self.addresses else ()
        six = (self.guest_network6,) if self.addresses6 else ()
        return tuple(map(ends_of, (*four, *six)))

    @property
    def is_macvlan(self) -> bool:
        """True if the link is a macvlan, whose MTU the host's interface bounds."""
        return self.kind is NicKind.MACVTAP or self.on_macvlan

    @property
    def host_place(self) -> str:
        """A key for the bridge or interface of the host to which the link leads; empty for CNI."""
        if self.kind is NicKind.CNI:
            return ""
        if self.target is None:
            return BUILT_IN
        return self.target.spec.link or self.target.uid

    @property
    def of_segment(self) -> bool:
        return self.target is not None and self.target.spec.kind in ON_SEGMENTS

    @property
    def on_segment(self) -> bool:
        """True if the DHCP server of a segment gives the guest its address."""
        has_pool = self.target is not None and self.target.spec.claimed
        return (self.of_segment and not has_pool) or self.asks_segment

    @property
    def filters_reach(self) -> bool:
        """True if the tap's filter limits the reach of the guest by this interface.

        The filter must do this if the host sees none of the guest's packets.
        """
        return self.of_segment or self.asks_segment or self.off_host or self.on_macvlan

    @property
    def network_dns(self) -> tuple[str, ...]:
        """The name servers in the network object. If empty, the node's servers apply."""
        return self.target.spec.dns if self.target is not None else ()

    @property
    def eth(self) -> str:
        """The name of the link to the network, inside the VM's namespace."""
        return f"eth{self.index}"

    @property
    def bridge(self) -> str:
        """The name of the bridge that connects `eth` with `tap`."""
        return f"br{self.index}"

    @property
    def tap(self) -> str:
        """The name of the tap that QEMU opens."""
        return f"tap{self.index}"

    @property
    def hardware(self) -> tuple[object, ...]:
        """The properties that stay the same while a guest runs."""
        place = self.network, self.kind, self.place
        bound = self.binding, self.ports, self.guest_network, self.guest_network6
        return self.name, place, self.mac, self.asked_mtu, self.queues, self.publish, bound


class Attachment(LenientModel):
    """The network of one VM: first a plan without addresses, then the result."""

    schema_version: int = SCHEMA_VERSION
    uid: str
    epoch: int
    generation: int
    namespace: str = ""
    vm_name: str = ""
    firmware_uuid: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    owner: str = ""
    """The labels and the owner of the VM, which select its security groups."""
    dns_config: DnsConfig | None = None
    """The DNS settings of the VM, as the guest got them at its start.

    If None, the settings of the VM's networks apply.
    """
    made: bool = False
    """True when all steps are done. Only networks with CNI plugins need this field. After a crash,
    the unfinished steps of such a network are undone; those of other networks are repeated."""
    nics: tuple[Nic, ...] = Field(())

    @property
    def netns(self) -> str:
        return names.netns(self.uid)

    @property
    def has_cni(self) -> bool:
        return any(nic.kind is NicKind.CNI for nic in self.nics)

    @property
    def joined(self) -> "Attachment":
        if not any(nic.pending for nic in self.nics):
            return self
        return self.with_nics(nic for nic in self.nics if not nic.pending)

    @property
    def changing(self) -> bool:
        """True while an interface is pending or leaving. A new start of the VM ends this."""
        return any(nic.pending or nic.leaving for nic in self.nics)

    def with_nics(self, nics: Iterable[Nic]) -> "Attachment":
        return self.model_copy(update={"nics": tuple(nics)})

    def same_for_guest(self, other: "Attachment") -> bool:
        same = [nic.hardware for nic in self.nics] == [nic.hardware for nic in other.nics]
        return same and self.dns_config == other.dns_config

    def tuned_as(self, other: "Attachment") -> "Attachment":
        wanted = {nic.name: nic for nic in other.nics}
        return self.model_copy(
            update={"nics": tuple(_tuned_as(nic, wanted.get(nic.name, nic)) for nic in self.nics)}
        )

    def statuses(self) -> tuple[InterfaceStatus, ...]:
        return tuple(
            InterfaceStatus(
                name=nic.name,
                network=nic.network,
                mac=nic.mac,
                addresses=nic.addresses,
                gateway=nic.gateway,
                gateway6=nic.gateway6,
                mtu=nic.mtu,
                queues=nic.queues,
                state=nic.state,
                published=nic.published,
                tap=nic.tap,
                netns=self.netns,
                plug=nic.plug,
                binding=nic.binding or "",
                guest_addresses=tuple(str(ends.guest) for ends in nic.guest_ends),
            )
            for nic in self.nics
        )


def _tuned_as(nic: Nic, other: Nic) -> Nic:
    return nic.model_copy(update={"state": other.state, "limits": other.limits})
