"""Checks the answers of imaged and netd against the VM's record."""

import ipaddress

from virtbus.schemas.network import InterfaceStatus, NetworkState, PlugState, check_mac
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.vm import Interface, VmRecord


def contradiction(record: VmRecord, part: ImageReady | NetReady) -> str:
    """Return the contradiction between `part` and the record, or an empty string."""
    if part.uid != record.uid:
        return f"it reports VM {part.uid[:64]!r}"
    if isinstance(part, ImageReady) or part.error is not None:
        return ""
    wanted = {nic.name: nic for nic in record.spec.domain.devices.interfaces}
    if record.spec.network_state is NetworkState.RELEASED:
        wanted = {}
    settled = all(one.plug is PlugState.PLUGGED for one in part.interfaces)
    if settled and [one.name for one in part.interfaces] != list(wanted):
        return "it reports other interfaces than the spec has"
    stay = [one for one in part.interfaces if one.plug is not PlugState.LEAVING]
    if any(one.name not in wanted for one in stay):
        return "it reports an interface that the spec has not"
    return next((why for one in stay if (why := _of_interface(wanted[one.name], one))), "")


def _of_interface(wanted: Interface, reported: InterfaceStatus) -> str:
    try:
        mac = check_mac(reported.mac)
        addresses = [ipaddress.ip_interface(address).ip for address in reported.addresses]
    except ValueError as error:
        return f"interface {wanted.name}: {error}"
    if wanted.mac_address is not None and mac != wanted.mac_address:
        return f"interface {wanted.name} has another MAC address than the spec"
    # the agent pings these addresses, and connects to them for clients (port-forward)
    unusable = [a for a in addresses if a.is_loopback or a.is_unspecified or a.is_multicast]
    return f"interface {wanted.name} cannot have the address {unusable[0]}" if unusable else ""
