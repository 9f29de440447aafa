"""Applies the link state and the limits of interfaces, in the calling thread's namespace.

For the link state `down`, the Linux bridge in the namespace is set down, and forwards no frame in
either direction. The tap stays up, because its carrier shows that a guest uses it. Frames to the
guest leave by its tap, and frames from the guest leave by the link to the network. So each limit is
a scheduler of one of these links.
"""

import errno
from collections.abc import Iterator, Sequence

from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.netlink import NetlinkCall
from virtbus.netd.core.traffic_control import limited, limited_link, list_schedulers, unlimited
from virtbus.netd.edge import links
from virtbus.netd.edge.netlink import Netlink, NetlinkError
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network import LinkState
from virtbus.schemas.nic import NicLimit


def link_state(nic: Nic) -> NetlinkCall:
    """Return the call that sets the Linux bridge of `nic` in the namespace up or down."""
    return links.set_link(nic.bridge, up=nic.state is LinkState.UP)


def limit(inside: Netlink, nics: Sequence[Nic], *, lift: bool = False) -> None:
    """Apply the limits of `nics`. With `lift`, also remove limits that are no longer wanted.

    Raises:
        VirtbusError: 422 `no_limits` if the kernel has no token bucket filter (`sch_tbf`).
    """
    calls = []
    for nic in nics:
        for name, wanted in _directions(nic):
            link = links.find(inside, name) if wanted is not None or lift else None
            if link is not None:
                calls.append(
                    unlimited(link.index)
                    if wanted is None
                    else limited(link.index, wanted, nic.mtu)
                )
    try:
        inside.do(calls)
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            raise
        message = "the kernel of this host has no sch_tbf, so it cannot limit a link; load it"
        raise VirtbusError(Code.UNSUPPORTED, "no_limits", message) from error


def faults(inside: Netlink, nics: Sequence[Nic]) -> list[str]:
    """Return a message for each wrong link state, and for each limit that is missing or wrong."""
    found = []
    for nic in nics:
        bridge = links.find(inside, nic.bridge)
        if bridge is not None and bridge.up != (nic.state is LinkState.UP):
            found.append(f"{nic.bridge} is {'up' if bridge.up else 'down'}")
    if any(nic.limits is not None for nic in nics):
        found += _wrong_limits(inside, nics)
    return found


def _wrong_limits(inside: Netlink, nics: Sequence[Nic]) -> Iterator[str]:
    schedulers = (limited_link(reply.message) for reply in inside.dump(list_schedulers()))
    rates = dict(one for one in schedulers if one is not None)
    for nic in nics:
        for name, wanted in _directions(nic):
            link = links.find(inside, name) if wanted is not None else None
            if link is None or wanted is None:
                continue
            if rates.get(link.index) != wanted.bytes_per_s:
                yield f"the limit of {name} is gone"


def _directions(nic: Nic) -> tuple[tuple[str, NicLimit | None], ...]:
    """Return the tap, by which frames to the guest leave, and `eth`, each with its limit."""
    if nic.limits is None:
        return (nic.tap, None), (nic.eth, None)
    return (nic.tap, nic.limits.inbound), (nic.eth, nic.limits.outbound)
