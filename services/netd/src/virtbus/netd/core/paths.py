"""The path of a VM's packets, and the next step for each fault on this path."""

from collections.abc import Iterable, Mapping

from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.group_filter import GroupedNic
from virtbus.schemas.network import LinkState, PlugState
from virtbus.schemas.network_path import NicPath, PathFault
from virtbus.schemas.security_group import Direction

_WITHOUT_END = frozenset({NicKind.CNI, NicKind.MACVTAP})
RESTART = "`virtbus vm restart` gives the guest its network again"
OF_HOST_DOWN = "of the host is down"
"""The end of a message about a link of the host, which virtbus does not change."""
OF_MTU = "has the MTU"
"""The words after the link's name, in a message about a link with a smaller MTU than the guest's
network."""
_SET_UP = "set the link up on the host"
_RAISE_MTU = "set the MTU of the host's link again; netd then restores the guest's"
MENDED = "netd restores it within five minutes, `virtbus node audit --repair` at once"


def paths_of(
    attachment: Attachment, bridges: Mapping[str, str], grouped: Iterable[GroupedNic] = ()
) -> tuple[NicPath, ...]:
    """Return the path of each interface, in order.

    `bridges` has the bridge or link of the host for each interface, by the interface's name.
    `grouped` are the interfaces that security groups or their networks isolate.
    """
    isolated = {nic.index: nic.isolated for nic in grouped}
    pairs = zip(attachment.nics, attachment.statuses(), strict=True)
    return tuple(
        NicPath(
            status=status,
            kind=str(nic.kind),
            bridge=nic.bridge,
            link=nic.eth,
            host_link=nic.host_link if nic.kind not in _WITHOUT_END else "",
            host_bridge=bridges.get(nic.name, ""),
            plugins=_plugins(nic),
            limits=_limits(nic),
            ports=tuple(port.text for port in nic.ports),
            leased=nic.on_segment,
            isolated=tuple(one for one in Direction if one in isolated.get(nic.index, ())),
        )
        for nic, status in pairs
    )


def _plugins(nic: Nic) -> tuple[str, ...]:
    plugins = (nic.cni.conflist if nic.cni is not None else {}).get("plugins", ())
    return tuple(str(one.get("type", "")) for one in plugins)


def _limits(nic: Nic) -> dict[str, int]:
    if nic.limits is None:
        return {}
    ways = {"to guest": nic.limits.inbound, "from guest": nic.limits.outbound}
    return {way: limit.bytes_per_s for way, limit in ways.items() if limit is not None}


def faults_of(attachment: Attachment, found: Iterable[str], *, mendable: bool) -> list[PathFault]:
    """Return messages about links as faults, each with the interface that has the link.

    `mendable` means that netd itself restores the links.
    """
    owned = [(what, _owner(attachment, what)) for what in found]
    return [
        PathFault(
            interface=name,
            what=what,
            next_step=_step_of_host(attachment, what, name) or (MENDED if mendable else RESTART),
        )
        for what, name in owned
    ]


def _step_of_host(attachment: Attachment, what: str, name: str) -> str:
    """Return the next step for a fault of the host's own link; empty for other faults."""
    if what.endswith(OF_HOST_DOWN):
        return _SET_UP
    on_host = {nic.name: nic.eth for nic in attachment.nics if nic.is_macvlan}
    eth = on_host.get(name)
    return _RAISE_MTU if eth is not None and what.startswith(f"{eth} {OF_MTU}") else ""


def _owner(attachment: Attachment, what: str) -> str:
    words = what.replace(":", " ").split()
    own = (nic.name for nic in attachment.nics if {nic.tap, nic.bridge, nic.eth} & set(words))
    links = (nic.name for nic in attachment.nics if nic.host_link in words)
    return next(own, next(links, ""))


def states_of(attachment: Attachment, held: set[str], *, runs: bool) -> list[PathFault]:
    """Return a fault for each interface that the guest cannot use. `held` are the open taps."""
    found = []
    for nic in attachment.nics:
        if nic.plug is PlugState.WAITING:
            what = "the guest does not have the device yet"
            step = "`virtbus vm get` says in NicChangePending why"
        elif nic.plug is PlugState.LEAVING:
            what = "the guest has not released the device yet"
            step = "release it in the guest, or restart the VM"
        elif runs and nic.tap not in held:
            what, step = f"the guest's QEMU does not have {nic.tap} open", RESTART
        elif nic.state is LinkState.DOWN:
            what, step = "its link is down in the VM's spec", "set the interface's state to up"
        else:
            continue
        found.append(PathFault(interface=nic.name, what=what, next_step=step))
    return found
