"""Reads a running guest's NICs from its domain, and renders NICs for hot-plug.

vmwrapper adds the NICs of a guest's start. libvirt does not know these NICs, so the domain's
metadata names them. libvirt itself plugs later NICs, and their aliases contain their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.element import el, to_text
from virtbus.nodeagent.core.metadata import nics_at_start
from virtbus.nodeagent.core.nics import USUAL_MTU, hardware_hash, nic_id
from virtbus.schemas.network import InterfaceStatus, LinkState, PlugState
from virtbus.schemas.nic import NicModel
from virtbus.schemas.nic_work import NicDone
from virtbus.schemas.vm import Interface, VmRecord

_ALIAS = "ua-nic-"
"""The prefix of the agent's aliases. libvirt demands `ua-`."""


@dataclass(frozen=True, slots=True)
class GuestNic:
    """A running guest's NIC: its QEMU device id, and the hash of its properties."""

    device: str
    hardware: str


@dataclass(frozen=True, slots=True)
class DomainNics:
    """The NICs in a domain: those of its start, in order, and later plugged NICs, by name."""

    started: tuple[tuple[str, GuestNic], ...]
    plugged: Mapping[str, GuestNic]
    free_ports: tuple[int, ...]
    """Root ports without a device. Ports of the start's NICs never count as free."""

    def started_as(self, name: str) -> int | None:
        """Return the NIC's number at the guest's start; None for a later NIC."""
        return next((at for at, (one, _) in enumerate(self.started) if one == name), None)

    def present(self, reported: Mapping[str, PlugState]) -> dict[str, GuestNic]:
        """Return the guest's NICs, by name. `reported` has netd's states.

        A NIC of the start counts only in the state `plugged` or `leaving`.
        """
        kept = {
            name: nic
            for name, nic in self.started
            if reported.get(name) in {PlugState.PLUGGED, PlugState.LEAVING}
        }
        return kept | dict(self.plugged)


def at_start(record: VmRecord) -> dict[str, GuestNic]:
    """Return the NICs of a guest that was just started for `record`, by name."""
    nics = enumerate(record.spec.domain.devices.interfaces)
    return {nic.name: GuestNic(nic_id(index), hardware_hash(nic)) for index, nic in nics}


def numbered(nics: tuple[tuple[str, str], ...]) -> tuple[tuple[str, GuestNic], ...]:
    """Return the NICs of a start, from their names and hashes in the domain's metadata."""
    return tuple(
        (name, GuestNic(nic_id(index), hardware)) for index, (name, hardware) in enumerate(nics)
    )


def domain_nics(xml: str) -> DomainNics:
    """Return the NICs in the XML of a running domain."""
    root = ET.fromstring(xml)  # noqa: S314  from libvirtd
    started = numbered(nics_at_start(root))
    plugged = {}
    for alias in root.findall("devices/interface/alias"):
        device = alias.get("name", "")
        hardware, _, name = device.removeprefix(_ALIAS).partition("-")
        if device.startswith(_ALIAS) and name:
            plugged[name] = GuestNic(device, hardware)
    ports = {
        int(one.get("index", "0"))
        for one in root.findall("devices/controller[@type='pci']")
        if one.get("model") == "pcie-root-port"
    }
    used = {int(one.get("bus", "0"), 16) for one in root.findall("devices/*/address[@type='pci']")}
    free = ports - used - set(range(1, len(started) + 1))
    return DomainNics(started, plugged, tuple(sorted(free)))


def alias_of(nic: Interface) -> str:
    """Return the alias of a plugged NIC."""
    return f"{_ALIAS}{hardware_hash(nic)}-{nic.name}"


def interface_xml(nic: Interface, made: NicDone, port: int) -> str:
    """Return libvirt's device of a NIC on root port `port`, with the tap from netd's `lend`.

    The NIC has no option ROM, because its boot order takes effect at the guest's next start.
    """
    virtio = nic.model is NicModel.VIRTIO
    interface = el(
        "interface",
        el("mac", address=made.mac),
        el("target", dev=made.tap, managed="no"),
        el("model", type=str(nic.model)),
        # without the attribute `name`, libvirt tries vhost-net, as netd does for vmwrapper's NICs
        el("driver", queues=made.queues) if virtio and made.queues > 1 else None,
        el("link", state="down") if nic.state is LinkState.DOWN else None,
        el("mtu", size=made.mtu) if virtio and made.mtu != USUAL_MTU else None,
        el("alias", name=alias_of(nic)),
        el("rom", enabled="no"),
        el("acpi", index=nic.acpi_index) if nic.acpi_index is not None else None,
        el(
            "address",
            type="pci",
            domain="0x0000",
            bus=f"0x{port:02x}",
            slot="0x00",
            function="0x0",
        ),
        type="ethernet",
    )
    return to_text(interface)


def states(reported: tuple[InterfaceStatus, ...]) -> dict[str, PlugState]:
    """Return the states of interfaces by name.

    Of two interfaces with one name, the leaving one counts.
    """
    return {one.name: one.plug for one in sorted(reported, key=lambda one: one.plug == "leaving")}
