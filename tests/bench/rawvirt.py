"""Raw libvirt: the same domain with QEMU itself as emulator and libvirt's own `ethernet` tap."""

import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

import libvirt
from tests.census import LIBVIRT_LOGS

QEMU = "/usr/bin/qemu-system-x86_64"
OVERLAY = ["qemu-img", "create", "-q", "-f", "qcow2"]


@dataclass
class RawVirt:
    """Domains made from a platform VM's own XML; QEMU's user must be able to traverse `folder`."""

    folder: Path
    template: str
    connection: libvirt.virConnect = field(init=False)
    seed: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Keep the seed of the template's VM, which will be deleted."""
        self.connection = libvirt.open("qemu:///system")
        for disk in ET.fromstring(self.template).iter("disk"):
            source = disk.find("source")
            if source is not None and disk.find("backingStore/source") is None:
                self.seed = Path(source.get("file", "")).read_bytes()

    def prepare(self) -> str:
        """Return the XML of a new domain and make its disks, outside the timer."""
        domain = ET.fromstring(self.template)
        uid = str(uuid.uuid4())
        _text(domain, "name", f"vbraw-{uid}")
        _text(domain, "uuid", uid)
        _remove(domain, "metadata")
        devices = domain.find("devices")
        assert devices is not None
        _text(devices, "emulator", QEMU)
        for disk in devices.findall("disk"):
            _own_disk(disk, self.folder / uid, self.seed)
        for device in [*devices.findall("serial"), *devices.findall("console")]:
            devices.remove(device)
        devices.append(self._serial(uid))
        devices.append(_tap())
        for alias in domain.iter("alias"):
            alias.attrib.clear()
        return ET.tostring(domain, encoding="unicode")

    def _serial(self, uid: str) -> ET.Element:
        serial = ET.Element("serial", type="unix")
        ET.SubElement(serial, "source", mode="bind", path=str(self.folder / f"{uid}.sock"))
        ET.SubElement(serial, "log", file=str(self.folder / f"{uid}.log"), append="on")
        ET.SubElement(serial, "target", type="isa-serial", port="0")
        return serial

    def start(self, xml: str) -> tuple[float, libvirt.virDomain]:
        """Return the seconds of define and create."""
        begun = time.perf_counter()
        domain = self.connection.defineXML(xml)
        domain.create()
        return time.perf_counter() - begun, domain

    def destroy(self, domain: libvirt.virDomain) -> float:
        """Return the seconds of destroy; then undefine the domain and remove its files."""
        begun = time.perf_counter()
        domain.destroy()
        took = time.perf_counter() - begun
        self.forget(domain)
        return took

    def forget(self, domain: libvirt.virDomain) -> None:
        """Remove everything of a domain that does not run."""
        uid = domain.UUIDString()
        domain.undefine()
        for path in [*self.folder.glob(f"{uid}*"), *LIBVIRT_LOGS.glob(f"vbraw-{uid}.log*")]:
            path.unlink()


def _text(parent: ET.Element, tag: str, text: str) -> None:
    child = parent.find(tag)
    if child is None:
        child = ET.SubElement(parent, tag)
    child.text = text


def _remove(parent: ET.Element, tag: str) -> None:
    for child in parent.findall(tag):
        parent.remove(child)


def _own_disk(disk: ET.Element, stem: Path, seed: bytes) -> None:
    """Make an overlay of the same base, or a copy of the seed."""
    source, target = disk.find("source"), disk.find("target")
    backing = disk.find("backingStore/source")
    assert source is not None
    assert target is not None
    path = stem.with_name(f"{stem.name}-{target.get('dev')}")
    if backing is not None:
        base = ["-F", str(disk.find("backingStore/format").get("type"))]  # type: ignore[union-attr]
        subprocess.run([*OVERLAY, *base, "-b", backing.get("file", ""), path], check=True)
    else:
        path.write_bytes(seed)
    source.attrib.clear()
    source.set("file", str(path))


def _tap() -> ET.Element:
    interface = ET.Element("interface", type="ethernet")
    ET.SubElement(interface, "model", type="virtio")
    ET.SubElement(interface, "rom", enabled="no")
    return interface
