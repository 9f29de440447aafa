"""Writes and reads the agent's own element in a domain's metadata."""

from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.element import Element
from virtbus.nodeagent.core.nics import hardware_hash
from virtbus.nodeagent.core.ports import DomainMetadata
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import spec_hash

NAMESPACE = "https://virtbus.dev/domain/1"
ET.register_namespace("virtbus", NAMESPACE)


def domain_hash(record: VmRecord) -> str:
    """Return the hex SHA-256 of `spec.domain`, without the fields that apply to a running guest.

    Other changes there need a restart of the guest. Each interface has a hash of its own
    (`nics.hardware_hash`), because interfaces are plugged while the guest runs.
    """
    domain, devices = record.spec.domain, record.spec.domain.devices
    disks = devices.disks
    if any(disk.limits or disk.tray for disk in disks):
        live = {"limits": None, "tray": None}
        disks = tuple(disk.model_copy(update=live) for disk in disks)
    devices = devices.model_copy(update={"disks": disks, "interfaces": ()})
    return spec_hash(domain.model_copy(update={"devices": devices}))


def metadata(record: VmRecord) -> Element:
    """Return the element for a record. It has no secrets: every libvirt client can read it."""
    element = ET.Element(f"{{{NAMESPACE}}}vm")
    values = {
        "uid": record.uid,
        "namespace": record.namespace,
        "name": record.name,
        "node": record.node,
        "epoch": str(record.epoch),
        "generation": str(record.generation),
        "power_epoch": str(record.power_epoch),
        "pause_epoch": str(record.pause_epoch),
        "spec_hash": record.spec_hash,
        "domain_hash": domain_hash(record),
        "nics": " ".join(
            f"{nic.name}:{hardware_hash(nic)}" for nic in record.spec.domain.devices.interfaces
        ),
        "traceparent": record.traceparent or "",
    }
    for name, value in values.items():
        ET.SubElement(element, f"{{{NAMESPACE}}}{name}").text = value
    return element


def parse(text: str) -> DomainMetadata | None:
    """Return the metadata in `text`, libvirt's XML for our namespace; None if it is incomplete.

    libvirt strips the prefix of the requested element, so names match with and without it.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314  our own element, from libvirtd
    except ET.ParseError:
        return None
    found = _values(root)
    try:
        return DomainMetadata(
            uid=found["uid"],
            epoch=int(found["epoch"]),
            domain_hash=found["domain_hash"],
            power_epoch=int(found.get("power_epoch", -1)),
            pause_epoch=int(found.get("pause_epoch", 0)),
            generation=int(found.get("generation", 0)),
            nics=parse_nics(found.get("nics")),
        )
    except (KeyError, ValueError):
        return None


def nics_at_start(domain: Element) -> tuple[tuple[str, str], ...]:
    """Return the NICs that the guest of a domain was started with, from the domain's whole XML."""
    own = domain.find(f"metadata/{{{NAMESPACE}}}vm")
    return () if own is None else parse_nics(_values(own).get("nics"))


def _values(element: Element) -> dict[str, str]:
    """Return our values by name. A later change of the metadata strips the names' prefix."""
    return {child.tag.rpartition("}")[2]: child.text or "" for child in element}


def parse_nics(text: str | None) -> tuple[tuple[str, str], ...]:
    """Return the names and hashes of the NICs that a guest was started with, in order."""
    pairs = (one.partition(":") for one in (text or "").split())
    return tuple((name, hardware) for name, _, hardware in pairs)
