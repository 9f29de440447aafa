"""Finds this host's links to segments, and checks the list of allowed links.

A segment is a layer-2 network that exists outside of virtbus. virtbus never makes, changes or
removes a link to a segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.names import OWNER_PREFIX
from virtbus.netd.edge import links
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import NetworkKind


@dataclass(frozen=True, slots=True)
class SegmentLink:
    """A link of the host that leads to a segment."""

    name: str
    index: int
    mtu: int
    carries: NetworkKind
    """The kind of network that can use the link."""
    pvid: int | None = None
    """The VLAN that a bridge gives new ports.

    None if the link is no bridge, if the bridge does not separate VLANs, or if the kernel lacks
    VLANs on bridges.
    """
    why_no_vlan: str = ""


class Segments:
    """The links that the setting `links_allowed` names."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = tuple(dict.fromkeys(allowed))

    def offered(self) -> list[SegmentLink]:
        """Return the links that exist. Blocks."""
        with Netlink() as host:
            found = [_find(host, name) for name in self._allowed]
        return [link for link in found if link is not None]

    def of(self, host: Netlink, nic: Nic) -> SegmentLink:
        """Return the link of an interface's network.

        Raises:
            VirtbusError: 403 `link_forbidden`: the setting `links_allowed` lacks the link.
                422 `link_missing`: the host has no such link for this kind of network.
                422 `no_vlans`: the network has a VLAN, but the link has no support for VLANs.
        """
        spec = nic.target.spec if nic.target is not None else None
        name = (spec.link if spec is not None else None) or ""
        if name not in self._allowed:
            raise _refused(
                nic,
                Code.DENIED,
                "link_forbidden",
                f"this node does not allow the link {name}; its operator adds it to netd's "
                "setting links_allowed",
            )
        link = _find(host, name)
        if link is None or spec is None or link.carries is not spec.kind:
            kind = spec.kind if spec is not None else ""
            way_out = "make it there, or move the VM"
            if link is not None:
                way_out = f"its {name} is for networks of the kind {link.carries}"
            message = f"this node has no link {name} for networks of the kind {kind}; {way_out}"
            raise _refused(nic, Code.UNSUPPORTED, "link_missing", message)
        if spec.vlan and link.pvid is None:
            raise _refused(nic, Code.UNSUPPORTED, "no_vlans", link.why_no_vlan)
        return link


def _find(host: Netlink, name: str) -> SegmentLink | None:
    """Return None for a missing link, a link of virtbus, or a port of a bridge."""
    found = links.describe(host, name)
    if found is None or found.alias.startswith(OWNER_PREFIX) or found.master:
        return None
    if found.kind != "bridge":
        return SegmentLink(name, found.index, found.mtu, NetworkKind.MACVTAP)
    why = ""
    if found.pvid is None:
        why = "the kernel of this host has no VLANs on bridges; use a bridge for each VLAN"
    elif not found.filters_vlans:
        why = (
            f"the bridge {name} does not separate VLANs; its operator runs: "
            f"ip link set {name} type bridge vlan_filtering 1"
        )
    pvid = None if why else found.pvid
    return SegmentLink(name, found.index, found.mtu, NetworkKind.BRIDGE, pvid, why)


def _refused(nic: Nic, code: Code, reason: str, message: str) -> VirtbusError:
    text = f"the network '{nic.network}': {message}"
    return VirtbusError(
        code, reason, text, details=(Detail(path=nic.network_path, message=message),)
    )
