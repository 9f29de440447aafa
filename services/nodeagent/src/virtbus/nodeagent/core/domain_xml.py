"""Renders a record as libvirt's domain XML (https://libvirt.org/formatdomain.html).

The domain suits Linux guests: q35, virtio devices, USB only for disks, no sound. The only values of
clients in the XML are checked names, sizes and ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from virtbus.nodeagent.core.addresses import (
    BALLOON,
    RNG,
    SERIAL,
    Addresses,
    assigned,
)
from virtbus.nodeagent.core.devices import (
    display_elements,
    filesystem_elements,
    guards,
    memory_backing,
)
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.disks import disk_controllers, disk_elements, usb_controller
from virtbus.nodeagent.core.element import Element, el, to_text
from virtbus.nodeagent.core.io_threads import io_threads
from virtbus.nodeagent.core.metadata import metadata
from virtbus.nodeagent.core.nvme import nvme_overrides
from virtbus.nodeagent.core.pcie import pci_controllers, port_address
from virtbus.nodeagent.core.shares import NO_SHARES, Shares
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.vm import Firmware, VmRecord, VmSpec

IGNITION_ENTRY = "opt/com.coreos/config"
"""The fw_cfg entry in which Ignition looks for its file (Ignition: supported platforms, qemu)."""
QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"


def domain_name(uid: str) -> str:
    """Return the name of a VM's domain in libvirt."""
    return f"vb-{uid}"


@dataclass(frozen=True, slots=True)
class DomainInputs:
    """The inputs of a domain's XML. `disks` and `seeds` are by volume name."""

    record: VmRecord
    disks: Mapping[str, DiskSource]
    seeds: Mapping[str, Path]
    console_socket: Path
    console_log: Path
    accelerator: str
    emulator: str
    ignition: Path | None = None
    """A file that the guest reads as fw_cfg `opt/com.coreos/config`."""
    shares: Shares = NO_SHARES
    kept: Addresses = field(default_factory=dict)
    """The addresses that devices had in the previous run."""
    skip_cpu_queries: bool = False
    """Benchmarks only: `qemu:del` skips libvirt's CPU queries and taints the domain."""


def render(inputs: DomainInputs) -> str:
    """Return the domain XML that libvirt defines."""
    record, spec = inputs.record, inputs.record.spec
    addresses = assigned(spec.domain, inputs.kept)
    domain = el(
        "domain",
        el("name", domain_name(record.uid)),
        el("uuid", record.uid),
        el("metadata", metadata(record, addresses)),
        el("memory", str(-(-spec.domain.memory.guest // 1024)), unit="KiB"),
        memory_backing(spec.domain.devices.filesystems),
        el("vcpu", str(spec.domain.cpu.vcpus), placement="static"),
        _threads(spec),
        _sysinfo(spec.domain.firmware),
        _fw_cfg(inputs.ignition),
        _os(spec.domain.firmware),
        el("features", el("acpi"), el("apic")),
        _cpu(spec, inputs.accelerator),
        el("clock", offset="utc"),
        el("on_poweroff", "destroy"),
        el("on_reboot", "restart"),
        el("on_crash", "destroy"),
        _devices(inputs, addresses),
        type="kvm" if inputs.accelerator == "kvm" else "qemu",
    )
    extensions = [nvme_overrides(spec.domain.devices.disks)]
    if inputs.skip_cpu_queries:
        skipped = el("qemu:del", capability="cpu-unavailable-features")
        extensions.append(el("qemu:capabilities", skipped))
    for extension in extensions:
        if extension is not None:
            domain.set("xmlns:qemu", QEMU_NAMESPACE)
            domain.append(extension)
    return to_text(domain)


def _threads(spec: VmSpec) -> Element | None:
    total = io_threads(spec.domain).total
    return el("iothreads", str(total)) if total else None


def _sysinfo(firmware: Firmware) -> Element | None:
    if firmware.serial is None:
        return None
    serial = el("entry", firmware.serial, name="serial")
    return el("sysinfo", el("system", serial), type="smbios")


def _fw_cfg(ignition: Path | None) -> Element | None:
    """Only the file's path is in the XML and in QEMU's arguments."""
    if ignition is None:
        return None
    return el("sysinfo", el("entry", name=IGNITION_ENTRY, file=str(ignition)), type="fwcfg")


def _os(firmware: Firmware) -> Element:
    smbios = el("smbios", mode="sysinfo") if firmware.serial is not None else None
    return el("os", el("type", "hvm", arch="x86_64", machine="q35"), smbios)


def _cpu(spec: VmSpec, accelerator: str) -> Element:
    cpu = spec.domain.cpu
    topology = el("topology", sockets=cpu.sockets, cores=cpu.cores, threads=cpu.threads)
    if cpu.model is not None:
        model = el("model", cpu.model, fallback="forbid")
        features = (el("feature", policy=one.policy, name=one.name) for one in cpu.features)
        return el("cpu", model, topology, *features, mode="custom", match="exact")
    if accelerator == "kvm":
        return el("cpu", topology, mode="host-passthrough", check="none", migratable="on")
    return el(
        "cpu",
        el("model", "qemu64", fallback="forbid"),
        topology,
        mode="custom",
        match="exact",
        check="none",
    )


def _devices(inputs: DomainInputs, addresses: Addresses) -> Element:
    record, spec = inputs.record, inputs.record.spec
    files = volume_files(inputs.disks, inputs.seeds)
    body = [
        *disk_elements(spec.domain, files, addresses, default_order(record)),
        *disk_controllers(spec.domain, addresses),
        el("controller", port_address(addresses, SERIAL), type="virtio-serial", index=0),
        el("memballoon", port_address(addresses, BALLOON), model="virtio"),
        el(
            "rng",
            el("backend", "/dev/urandom", model="random"),
            port_address(addresses, RNG),
            model="virtio",
        ),
        _serial(inputs),
        *display_elements(spec),
        el(
            "channel",
            el("source", mode="bind"),
            el("target", type="virtio", name="org.qemu.guest_agent.0"),
            type="unix",
        ),
        *filesystem_elements(spec.domain.devices.filesystems, inputs.shares, addresses),
        *guards(spec.domain.devices.watchdog, addresses),
    ]
    usb = usb_controller(spec.domain.devices.disks, addresses)
    return el(
        "devices",
        el("emulator", inputs.emulator),
        *pci_controllers(addresses),
        usb,
        *body,
    )


def volume_files(
    disks: Mapping[str, DiskSource], seeds: Mapping[str, Path]
) -> dict[str, DiskSource]:
    """Return the sources of disks and of ISOs with first-boot data, by volume name."""
    isos = {name: DiskSource(str(path), ImageFormat.RAW) for name, path in seeds.items()}
    return {**disks, **isos}


def _serial(inputs: DomainInputs) -> Element:
    """The console is a UNIX socket for one client, and a log file that libvirt writes."""
    return el(
        "serial",
        el("source", mode="bind", path=str(inputs.console_socket)),
        el("log", file=str(inputs.console_log), append="on"),
        el("target", type="isa-serial", port=0),
        type="unix",
    )


def default_order(record: VmRecord) -> dict[str, int]:
    """Return a boot order for the first volume with an image, after the NICs with an order.

    The result is empty if a disk has a boot order, or if no volume has an image.
    """
    spec, devices = record.spec, record.spec.domain.devices
    first = next((volume.name for volume in spec.volumes if record.image_of(volume)), "")
    if not first or any(disk.boot_order for disk in devices.disks):
        return {}
    return {first: 1 + max((nic.boot_order or 0 for nic in devices.interfaces), default=0)}
