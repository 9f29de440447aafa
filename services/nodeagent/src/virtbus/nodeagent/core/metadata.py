"""Writes and reads the agent's own element in a domain's metadata."""

import json
from collections.abc import Mapping
from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.element import Element
from virtbus.nodeagent.core.ports import DomainMetadata
from virtbus.schemas.vm import Disk, VmRecord
from virtbus.schemas.wire import spec_hash

NAMESPACE = "https://virtbus.dev/domain/1"
PREFIX = "virtbus"
ET.register_namespace(PREFIX, NAMESPACE)
_ADDRESSES, _DISKS = "addresses", "volume_disks"
_DIGITS = 12


def domain_hash(record: VmRecord) -> str:
    """Return the hex SHA-256 of `spec.domain`, without the fields that apply to a running guest.

    Other changes there need a restart of the guest. Disks that are volumes come and go, so they
    have hashes of their own.
    """
    domain, devices = record.spec.domain, record.spec.domain.devices
    disks, nics = devices.disks, devices.interfaces
    own = volume_names(record)
    if own:
        disks = tuple(disk for disk in disks if disk.name not in own)
    if any(disk.limits or disk.tray for disk in disks):
        disks = tuple(_still(disk) for disk in disks)
    if any(nic.state or nic.limits for nic in nics):
        nics = tuple(nic.model_copy(update={"state": None, "limits": None}) for nic in nics)
    if disks is devices.disks and nics is devices.interfaces:
        return spec_hash(domain)
    devices = devices.model_copy(update={"disks": disks, "interfaces": nics})
    return spec_hash(domain.model_copy(update={"devices": devices}))


def disk_hashes(record: VmRecord) -> dict[str, str]:
    """Return a short hash of each disk that is a volume, by name; live fields do not count."""
    own = volume_names(record)
    return {
        disk.name: spec_hash(_still(disk))[:_DIGITS]
        for disk in record.spec.domain.devices.disks
        if disk.name in own
    }


def volume_names(record: VmRecord) -> frozenset[str]:
    """Return the names of disks that are volumes (ADR 0045)."""
    return frozenset(one.name for one in record.spec.volumes if one.volume is not None)


def _still(disk: Disk) -> Disk:
    """Return a disk without the fields that apply to a running guest."""
    return disk.model_copy(update={"limits": None, "tray": None})


def metadata(record: VmRecord, addresses: Addresses) -> Element:
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
        _ADDRESSES: _json(addresses),
        _DISKS: _json(disk_hashes(record)),
        "traceparent": record.traceparent or "",
    }
    for name, value in values.items():
        ET.SubElement(element, f"{{{NAMESPACE}}}{name}").text = value
    return element


def with_disks(text: str, addresses: Addresses, disks: Mapping[str, str]) -> str:
    """Return our element in `text` with other addresses and disks, as libvirt stores it.

    libvirt adds the namespace and its prefix to the element.
    """
    root = ET.fromstring(text)  # noqa: S314  our own element, from libvirtd
    values = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    values |= {_ADDRESSES: _json(addresses), _DISKS: _json(disks)}
    element = ET.Element("vm")
    for name, value in values.items():
        ET.SubElement(element, name).text = value
    return ET.tostring(element, encoding="unicode")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def parse(text: str) -> DomainMetadata | None:
    """Return the metadata in `text`, libvirt's XML for our namespace; None if it is incomplete.

    libvirt strips the prefix of the requested element, so names match with and without it.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314  our own element, from libvirtd
    except ET.ParseError:
        return None
    found = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    try:
        return DomainMetadata(
            uid=found["uid"],
            epoch=int(found["epoch"]),
            domain_hash=found["domain_hash"],
            power_epoch=int(found.get("power_epoch", -1)),
            pause_epoch=int(found.get("pause_epoch", 0)),
            generation=int(found.get("generation", 0)),
            addresses=json.loads(found.get(_ADDRESSES) or "{}"),
            disks=json.loads(found.get(_DISKS) or "{}"),
        )
    except (KeyError, ValueError):
        return None
