"""Writes and reads the agent's own element in a domain's metadata."""

import json
from collections.abc import Mapping
from functools import lru_cache
from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.element import Element
from virtbus.nodeagent.core.nics import hardware_hash
from virtbus.nodeagent.core.ports import DomainMetadata
from virtbus.schemas.vm import Disk, Domain, VmRecord
from virtbus.schemas.wire import spec_hash

NAMESPACE = "https://virtbus.dev/domain/1"
PREFIX = "virtbus"
_ADDRESSES, _DISKS = "addresses", "volume_disks"
_DIGITS = 12


def domain_hash(record: VmRecord) -> str:
    """Return a text that differs after each change of the record that needs a restart of the guest.

    The text is a SHA-256 of `spec.domain`, without the fields that can change in a running guest. A
    hash of DNS settings, and the generation of first-boot data, follow if the VM has them.
    Pluggable devices are left out: disks that are volumes, and interfaces, have their own hashes
    (`disk_hashes`, `nics.hardware_hash`).
    """
    found, dns = _domain_hash(record.spec.domain, volume_names(record)), record.spec.dns_config
    found = found if dns is None else f"{found}.{spec_hash(dns)}"
    return f"{found}.s{record.seed_generation}" if record.seed_generation else found


@lru_cache(maxsize=64)
def _domain_hash(domain: Domain, own: frozenset[str]) -> str:
    """Return the hash without the disks `own`, which have their own hashes.

    The cache helps because many VMs of a node have equal domains.
    """
    disks = tuple(_still(disk) for disk in domain.devices.disks if disk.name not in own)
    devices = domain.devices.model_copy(update={"disks": disks, "interfaces": ()})
    return spec_hash(domain.model_copy(update={"devices": devices, "resources": None}))


def disk_hashes(record: VmRecord) -> dict[str, str]:
    """Return a short hash of each disk that is a volume, by name.

    The hash ignores fields that can change in a running guest.
    """
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
    return disk.model_copy(update={"limits": None, "tray": None})


def metadata(record: VmRecord, addresses: Addresses) -> Element:
    """Return the element for a record. Every libvirt client can read it, so it has no secrets."""
    element = ET.Element(f"{PREFIX}:vm", {f"xmlns:{PREFIX}": NAMESPACE})
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
        _ADDRESSES: _json(addresses),
        _DISKS: _json(disk_hashes(record)),
        "traceparent": record.traceparent or "",
    }
    for name, value in values.items():
        ET.SubElement(element, f"{PREFIX}:{name}").text = value
    return element


def with_disks(text: str, addresses: Addresses, disks: Mapping[str, str]) -> str:
    """Replace addresses and disks in the agent's element `text`, for `setMetadata`.

    libvirt adds the namespace and its prefix to the result.
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
    """Return the metadata in `text`, libvirt's XML for NAMESPACE; None if damaged or incomplete.

    libvirt strips the namespace's prefix from some names, so names match with and without it.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314  our own element, from libvirtd
    except ET.ParseError:
        return None
    found = _values(root)
    try:
        addresses, disks = _addresses_and_disks(found)
        return DomainMetadata(
            uid=found["uid"],
            epoch=int(found["epoch"]),
            domain_hash=found["domain_hash"],
            power_epoch=int(found.get("power_epoch", -1)),
            pause_epoch=int(found.get("pause_epoch", 0)),
            generation=int(found.get("generation", 0)),
            nics=parse_nics(found.get("nics")),
            addresses=addresses,
            disks=disks,
        )
    except (KeyError, ValueError):
        return None


def nics_at_start(domain: Element) -> tuple[tuple[str, str], ...]:
    """Return names and hashes of the NICs of the guest's start, from the domain's whole XML."""
    return parse_nics(_own_values(domain).get("nics"))


def noted_disks(domain: Element) -> tuple[Addresses, dict[str, str]]:
    """Return the addresses of all devices, and the hashes of disks, from the domain's whole XML.

    Both are empty if the metadata is missing or damaged.
    """
    try:
        return _addresses_and_disks(_own_values(domain))
    except ValueError:
        return {}, {}


def _own_values(domain: Element) -> dict[str, str]:
    """Return the values of the agent's element in the domain's whole XML; empty without it."""
    own = domain.find(f"metadata/{{{NAMESPACE}}}vm")
    return {} if own is None else _values(own)


def _addresses_and_disks(values: Mapping[str, str]) -> tuple[Addresses, dict[str, str]]:
    return json.loads(values.get(_ADDRESSES) or "{}"), json.loads(values.get(_DISKS) or "{}")


def _values(element: Element) -> dict[str, str]:
    return {child.tag.rpartition("}")[2]: child.text or "" for child in element}


def parse_nics(text: str | None) -> tuple[tuple[str, str], ...]:
    """Return names and hashes of the NICs of a guest's start, in order."""
    pairs = (one.partition(":") for one in (text or "").split())
    return tuple((name, hardware) for name, _, hardware in pairs)
