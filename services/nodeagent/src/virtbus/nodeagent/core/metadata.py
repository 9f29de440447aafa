"""Our element in a domain's metadata: the hypervisor is the agent's database (design §5)."""

from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.element import Element
from virtbus.nodeagent.core.ports import DomainMetadata
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import spec_hash

NAMESPACE = "https://virtbus.dev/domain/1"
ET.register_namespace("virtbus", NAMESPACE)
_FIELDS = ("uid", "namespace", "name", "node", "spec_hash", "domain_hash", "traceparent")


def domain_hash(record: VmRecord) -> str:
    """Hex SHA-256 of the part of the spec that a running domain cannot take over."""
    return spec_hash(record.spec.domain)


def metadata(record: VmRecord) -> Element:
    """The element of a record. Holds no secret: it is readable by every libvirt client."""
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
        "traceparent": record.traceparent or "",
    }
    for name, value in values.items():
        ET.SubElement(element, f"{{{NAMESPACE}}}{name}").text = value
    return element


def parse(text: str) -> DomainMetadata | None:
    """What libvirt gives back for our namespace; None where it is not whole.

    libvirt strips the prefix of the element that is asked for, so names match with and without.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314  our own element, from libvirtd
    except ET.ParseError:
        return None
    found = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    try:
        return DomainMetadata(
            epoch=int(found["epoch"]),
            generation=int(found["generation"]),
            power_epoch=int(found.get("power_epoch", -1)),
            pause_epoch=int(found.get("pause_epoch", 0)),
            **{name: found[name] for name in _FIELDS},
        )
    except (KeyError, ValueError):
        return None
