"""Applies link states and rate limits of interfaces, in the calling thread's namespace.

The link state `down` sets the inner bridge down, which then forwards no frames. The tap stays up,
because its carrier shows that a guest uses it. Each limit is a scheduler for outgoing frames: of
the tap for frames to the guest, of `eth` for frames from the guest.
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
    """Return the call that sets the inner bridge of `nic` up or down."""
    return links.set_link(nic.bridge, up=nic.state is LinkState.UP)


def limit(inside: Netlink, nics: Sequence[Nic], *, lift: bool = False) -> None:
    """Apply the limits of `nics`. With `lift`, also remove unwanted limits.

    Raises:
        VirtbusError: 422 `no_limits`: the kernel has no token bucket filter (`sch_tbf`).
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
    """Return a message for each wrong link state, and each missing or wrong limit."""
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
    """Return the tap (frames to the guest leave by it) and `eth`, each with its limit."""
    if nic.limits is None:
        return (nic.tap, None), (nic.eth, None)
    return (nic.tap, nic.limits.inbound), (nic.eth, nic.limits.outbound)
