"""The attacher of each kind of network, which connects interfaces to the host.

A further kind needs one attacher and one row in `Attachers`. A binding for several kinds has an
attacher that uses the attachers of these kinds. `guest_links` makes the links inside the VM's
namespace, for all kinds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.cni import at_network, planned, refuse_other_plugins
from virtbus.netd.core.masquerade import refuse_overlap
from virtbus.netd.core.published import check_ports
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge.attacher import Attacher
from virtbus.netd.edge.bridge_attacher import HostBridgeAttacher
from virtbus.netd.edge.cni import Cni
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.macvtap_attacher import MacvtapAttacher
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.overlay_attacher import OverlayAttacher
from virtbus.netd.edge.own_bridge_attacher import OwnBridgeAttacher
from virtbus.netd.edge.passt_attacher import PasstAttacher
from virtbus.netd.edge.plugin_reach import PluginReach
from virtbus.netd.edge.segments import Segments
from virtbus.netd.edge.tunnels import Tunnels
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.nic import NicBinding


@dataclass(frozen=True, slots=True)
class CniAttacher:
    """Plans interfaces of conflists, and limits the reach of their guests.

    `plugin_chains` runs the plugins once the namespace exists. It stores the result of each
    conflist before it runs the plugins of the next.
    """

    cni: Cni
    reach: PluginReach

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics) -> Nic:
        del used
        try:
            if nic.target is None or nic.target.spec.conflist is not None:
                name = nic.target.spec.conflist if nic.target is not None else None
                state = self.cni.load(name or nic.network, vm.namespace)
            else:
                state = self.cni.of_target(nic.target)
        except VirtbusError as error:
            raise at_network(error, nic) from error
        refuse_other_plugins(nic, state.conflist)
        return planned(nic, state)

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        del host, nics
        self.reach.sync()

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        """Do nothing: the plugins make all that is needed."""

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        del nics
        if mend:
            self.reach.mend()
        return [] if mend else self.reach.faults()

    def detach(self, left: Sequence[Nic]) -> None:
        del left
        self.reach.tidy()


class Attachers:
    """The attacher of each kind of network."""

    def __init__(
        self,
        bridges: HostBridges,
        cni: Cni,
        segments: Segments,
        tunnels: Tunnels,
        passt: Path = Path("/usr/bin/passt"),
    ) -> None:
        self.bridges = bridges
        self.tunnels = tunnels
        self.plugin_reach = PluginReach(bridges.built_in)
        self.segments = segments
        bridged = OwnBridgeAttacher(bridges)
        self._of: Mapping[NicKind, Attacher] = {
            NicKind.BRIDGE: bridged,
            NicKind.NAT: bridged,
            NicKind.ROUTED: bridged,
            NicKind.ISOLATED: bridged,
            NicKind.OVERLAY: OverlayAttacher(bridged, tunnels),
            NicKind.HOST_BRIDGE: HostBridgeAttacher(segments, bridges.built_in),
            NicKind.MACVTAP: MacvtapAttacher(segments, bridges.built_in),
            NicKind.CNI: CniAttacher(cni, self.plugin_reach),
        }
        self.passt = PasstAttacher(self._of, passt)

    def host_side(self, nic: Nic) -> str:
        """Return the bridge or interface of the host to which the link leads; empty for CNI."""
        if nic.kind is NicKind.CNI:
            return ""
        link = nic.target.spec.link if nic.target is not None else None
        return link or self.bridges.name_of(nic)

    def plan(self, vm: Attachment, used: UsedNics, own: Sequence[Nic] = ()) -> Attachment:
        """Return the attachment with an address or a conflist for each interface.

        `own` are further interfaces of the VM, which are not planned. Raises VirtbusError if a
        network cannot give what the record requires, or if another interface already has it.
        """
        check_ports(vm, [*used.publishing(but=vm.uid), *own])
        nics: list[Nic] = []
        with used.without(vm.uid) as others:
            for nic in vm.nics:
                others.put(vm.uid, [*own, *nics])
                nics.append(refuse_overlap(self._attacher(nic).plan(nic, vm, others)))
        return vm.model_copy(update={"nics": tuple(nics)})

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        for attacher, own in self._grouped(nics):
            attacher.prepare(host, own)

    def attach(self, host: Netlink, vm: Attachment, netns_fd: int) -> None:
        for attacher, own in self._grouped(vm.nics):
            attacher.attach(host, vm.uid, own, netns_fd)

    def verify(self, nics: Sequence[Nic], *, mend: bool = False) -> list[str]:
        found: list[str] = []
        for attacher, own in self._grouped(nics):
            found += attacher.verify(own, mend=mend)
        return found

    def detach(self, left: Sequence[Nic]) -> None:
        for attacher in dict.fromkeys(self._of.values()):
            attacher.detach(left)

    def _attacher(self, nic: Nic) -> Attacher:
        return self.passt if nic.binding is NicBinding.PASST else self._of[nic.kind]

    def _grouped(self, nics: Sequence[Nic]) -> list[tuple[Attacher, list[Nic]]]:
        """Return the interfaces by attacher. Several kinds may share an attacher."""
        groups: dict[Attacher, list[Nic]] = {}
        for nic in nics:
            groups.setdefault(self._attacher(nic), []).append(nic)
        return list(groups.items())
