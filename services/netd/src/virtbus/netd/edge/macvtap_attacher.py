"""Connects VMs to an unbridged interface of the host: networks of kind `macvtap`.

The VM's namespace has a macvlan link instead of the kernel's macvtap. The inner bridge connects the
macvlan link with a tap. The guest thus has the same tap, filter and limits as on other networks.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from virtbus.netd.core.address_assignment import on_segment
from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge import links
from virtbus.netd.edge.bridge_attacher import is_down
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.netlink import Netlink, NetlinkError
from virtbus.netd.edge.segments import Segments
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import MacvtapMode


@dataclass(frozen=True, slots=True)
class MacvtapAttacher:
    """Implements `attacher.Attacher`."""

    segments: Segments
    built_in: HostBridge

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics) -> Nic:
        """Return the interface with its addresses and MTU. Raises VirtbusError.

        409 `link_in_use`: another guest is on the link, and one of both guests has mode passthru.
        """
        with Netlink() as host:
            link = self.segments.of(host, nic)
        if any(
            MacvtapMode.PASSTHRU in {mode_of(nic), mode_of(other)}
            for other in used.on_host_link(link.name)
        ):
            raise _taken(nic, link.name)
        hosts = self.built_in.reach.hosts
        return on_segment(nic, vm.uid, link.mtu, used.addresses(nic), hosts)

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        """The host already has its interface."""

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        """Make a macvlan link in the namespace for each interface. Raises VirtbusError.

        409 `link_in_use`: the kernel refuses a further link.
        """
        del uid
        for nic in nics:
            link = self.segments.of(host, nic)
            mode = mode_of(nic)
            # in mode passthru, the link has the host interface's MAC and passes all frames
            mac = None if mode is MacvtapMode.PASSTHRU else nic.mac
            call = links.new_macvlan(nic.eth, link.index, mode, netns_fd, mac=mac, mtu=link.mtu)
            try:
                host.do([call])
            except NetlinkError as error:
                if error.errno in {errno.EINVAL, errno.EBUSY, errno.EADDRINUSE}:
                    raise _taken(nic, link.name) from error
                raise

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        """Return a message for each interface of the host that is gone or down.

        With `mend`, return no messages: netd never repairs the host's own interfaces.
        """
        found = []
        with Netlink() as host:
            for nic in nics:
                try:
                    found += is_down(host, nic, self.segments.of(host, nic))
                except VirtbusError as error:
                    found.append(f"{nic.eth}: {error}")
        return [] if mend else found

    def detach(self, left: Sequence[Nic]) -> None:
        """The links end with their namespaces."""


def mode_of(nic: Nic) -> MacvtapMode:
    """Return the mode of an interface's network, by default `bridge`."""
    mode = nic.target.spec.mode if nic.target is not None else None
    return mode or MacvtapMode.BRIDGE


def _taken(nic: Nic, link: str) -> VirtbusError:
    message = (
        f"the network '{nic.network}' cannot have a further guest on {link} of this node: it is in "
        "use by a bridge, or by a guest in the mode passthru; move the VM, or use another link"
    )
    detail = Detail(path=nic.network_path, message=f"{link} is in use")
    return VirtbusError(Code.CONFLICT, "link_in_use", message, details=(detail,))
