"""Makes, moves and deletes the taps of interfaces that are plugged into a running guest.

libvirt opens a tap in the host's namespace. The tap is down and passes no frame until it is in the
VM's namespace. All functions block, and some leave their thread in the VM's namespace: call each in
`in_thread`.
"""

from collections.abc import Iterable

from virtbus.netd.core import names
from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.hotplug import tap_lost
from virtbus.netd.edge import links, taps
from virtbus.netd.edge.host_bridges import has_host_end
from virtbus.netd.edge.namespaces import Namespaces, opened
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import Code, VirtbusError


def lend(attachment: Attachment, nic: Nic) -> str:
    """Ensure the tap of `nic` in the host's namespace, and return its name there.

    Raises:
        VirtbusError: 409 `link_taken`: another VM has a link of this name.
    """
    name = names.lent_tap(attachment.uid, nic.index)
    with Netlink() as host:
        found = links.find(host, name)
        if found is not None and found.alias not in {"", attachment.uid}:
            message = f"{name} on this host belongs to {found.alias}; give the VM another uid"
            raise VirtbusError(Code.CONFLICT, "link_taken", message)
        if found is None:
            taps.make_tap(name, multi_queue=nic.queues > 1)
        host.do([links.set_link(name, alias=attachment.uid, mtu=nic.mtu)])
    return name


def bring_in(namespaces: Namespaces, attachment: Attachment, nic: Nic) -> None:
    """Move the tap that `lend` made to the VM's namespace, if necessary.

    Raises:
        VirtbusError: 409 `tap_lost`: the tap is in neither namespace.
    """
    name = names.lent_tap(attachment.uid, nic.index)
    with Netlink() as host, opened(namespaces.path(attachment.netns)) as netns:
        lent = links.find(host, name)
        namespaces.enter(attachment.netns)
        with Netlink() as inside:
            if lent is not None:
                inside.do([links.delete_link(nic.tap)])  # an earlier tap, which no process has open
                host.do([links.move_link(name, lent.index, nic.tap, netns)])
            elif links.find(inside, nic.tap) is None:
                raise tap_lost(nic)


def remove(namespaces: Namespaces, attachment: Attachment, nic: Nic) -> None:
    """Delete netd's links of `nic` after the guest has released the device. CNI links stay."""
    own = [names.lent_tap(attachment.uid, nic.index)]
    own += [nic.host_link] if has_host_end(nic) else []
    with Netlink() as host:
        _delete(host, own)
        if namespaces.exists(attachment.netns):
            namespaces.enter(attachment.netns)
            with Netlink() as inside:
                _delete(inside, (nic.tap, nic.bridge, *_own_eth(nic)))


def _own_eth(nic: Nic) -> tuple[str, ...]:
    """Return `eth` of a macvtap network.

    Otherwise `eth` ends with its veth peer, passt or CNI's DEL.
    """
    return (nic.eth,) if nic.kind is NicKind.MACVTAP else ()


def refuse_held(namespaces: Namespaces, attachment: Attachment, nic: Nic) -> None:
    """Raise 409 `tap_busy` while a process has the tap of `nic` open in the VM's namespace."""
    if not namespaces.exists(attachment.netns):
        return
    namespaces.enter(attachment.netns)
    with Netlink() as inside:
        tap = links.find(inside, nic.tap)
    if tap is not None and tap.running:
        raise taps.busy(nic.tap)


def return_lent(attachment: Attachment) -> None:
    """Delete the taps that `lend` made for interfaces that are not plugged yet (`pending`)."""
    lent = [names.lent_tap(attachment.uid, nic.index) for nic in attachment.nics if nic.pending]
    if lent:
        with Netlink() as host:
            _delete(host, lent)


def _delete(netlink: Netlink, own: Iterable[str]) -> None:
    for name in own:
        netlink.do([links.delete_link(name)])
