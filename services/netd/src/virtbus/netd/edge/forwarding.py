"""Switches on the host's IP forwarding, and restores the former settings.

IPv6 has one switch for all interfaces of a host. While it is on, only interfaces with `accept_ra` 2
accept router advertisements. `begin` therefore sets 2 on each interface that has 1, so that it
keeps its addresses and routes.
"""

from contextlib import suppress
from pathlib import Path

from virtbus.netd.edge.bridge_memo import Forwarding
from virtbus.netd.edge.namespaces import read_sysctl, write_sysctl

_FORWARD4, _FORWARD6 = "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"
_INTERFACES = Path("/proc/sys/net/ipv6/conf")
_HOST_ACCEPTS, _ROUTER_ACCEPTS = "1", "2"


def forwards4() -> bool:
    """Return True if the host forwards IPv4."""
    return read_sysctl(_FORWARD4) == "1"


def forwards6() -> bool:
    """Return True if the host forwards IPv6."""
    return _read6() == "1"


def _read6() -> str:
    """Return an empty string if the kernel has no IPv6."""
    try:
        return read_sysctl(_FORWARD6)
    except FileNotFoundError:
        return ""


def current() -> Forwarding:
    """Return the present values of the settings that `begin` changes."""
    return Forwarding(
        ip_forward=read_sysctl(_FORWARD4), forwarding6=_read6(), accept_ra=_accepting()
    )


def _accepting() -> dict[str, str]:
    """Return interfaces with `accept_ra` 1.

    They accept advertisements while they do not forward. An interface may vanish meanwhile, such as
    that of a VM which was deleted before.
    """
    found = {}
    for interface in sorted(_INTERFACES.glob("*")):
        with suppress(FileNotFoundError):
            value = (interface / "accept_ra").read_text().strip()
            if value == _HOST_ACCEPTS:
                found[interface.name] = value
    return found


def begin(*, six: bool) -> None:
    """Let the host forward IPv4, and IPv6 if `six`."""
    write_sysctl(_FORWARD4, "1")
    if six and not forwards6():
        for name in _accepting():
            _accept(name, _ROUTER_ACCEPTS)
        write_sysctl(_FORWARD6, "1")


def restore(before: Forwarding) -> None:
    """Set the former values, which `current` returned before `begin`."""
    write_sysctl(_FORWARD4, before["ip_forward"])
    if before["forwarding6"] and _read6() != before["forwarding6"]:
        write_sysctl(_FORWARD6, before["forwarding6"])
        for name, value in before["accept_ra"].items():
            _accept(name, value)


def silence_autoconfiguration(bridge: str) -> None:
    """Let a bridge ignore router advertisements, and skip duplicate address detection.

    `host_end.no_ipv6` has already switched its link-local addresses off.
    """
    for key in ("accept_ra", "accept_dad"):
        write_sysctl(f"net/ipv6/conf/{bridge}/{key}", "0")


def _accept(name: str, value: str) -> None:
    write_sysctl(f"net/ipv6/conf/{name}/accept_ra", value)  # without effect if it has gone
