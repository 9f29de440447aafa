"""The domain XML, checked by golden files; `REGENERATE=1 pytest …` rewrites them for review."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import canonicalize

import pytest

from virtbus.bus.runtime.pool_settings import NbdPool
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.domain_xml import QEMU_NAMESPACE, DomainInputs, render
from virtbus.nodeagent.core.element import el, to_text
from virtbus.nodeagent.core.metadata import parse
from virtbus.nodeagent.core.network_disks import NetworkDisk
from virtbus.nodeagent.core.nics import nic_devices
from virtbus.schemas.container import ContainerDisk
from virtbus.schemas.disk_buses import MAX_DISKS
from virtbus.schemas.ignition import Ignition
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.seed import CloudInitNoCloud
from virtbus.schemas.vm import (
    Cpu,
    CpuFeature,
    Devices,
    Disk,
    DiskBus,
    Domain,
    EmptyDisk,
    ErrorPolicy,
    Firmware,
    ImageVolume,
    Interface,
    Memory,
    Network,
    VmRecord,
    VmSpec,
    Volume,
)
from virtbus.schemas.volume_ref import NamedVolume
from virtbus.schemas.watchdog import I6300esb, Watchdog

ElementTree.register_namespace("qemu", QEMU_NAMESPACE)
GOLDEN = Path(__file__).parent / "golden"
SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")
UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


def record(spec: VmSpec, **more: object) -> VmRecord:
    fields: dict[str, object] = {
        "uid": UID,
        "namespace": "default",
        "name": "web",
        "spec": spec,
        "spec_hash": "0" * 64,
        "node": "n1",
        "created_ns": 1,
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    return VmRecord.model_validate(fields | more)


def overlay(volume: str, base: str = "ab") -> DiskSource:
    return DiskSource(
        path=f"/var/lib/virtbus/vms/{UID}/disk-{volume}.qcow2",
        backing_path=f"/var/lib/virtbus/images/data/{base}" if base else "",
        backing_format=ImageFormat.QCOW2 if base else None,
    )


def inputs(spec: VmSpec, **more: object) -> DomainInputs:
    fields: dict[str, object] = {
        "record": record(spec),
        "disks": {
            v.name: overlay(v.name, "ab" if v.image_ref else "")
            for v in spec.volumes
            if v.cloud_init_no_cloud is None
        },
        "seeds": {
            v.name: Path(f"/var/lib/virtbus/vms/{UID}/seed-{v.name}.iso")
            for v in spec.volumes
            if v.cloud_init_no_cloud is not None
        },
        "console_socket": Path(f"/run/virtbus/vms/{UID}/console.sock"),
        "console_log": Path(f"/var/lib/virtbus/consoles/{UID}.log"),
        "accelerator": "tcg",
        "emulator": "/usr/local/libexec/virtbus/vmwrapper",
    }
    return DomainInputs(**(fields | more))  # type: ignore[arg-type]


ROOT = Volume(name="root", image=ImageVolume(ref="tiny"))
SEED = Volume(name="cloudinit", cloud_init_no_cloud=CloudInitNoCloud(hostname="web"))
SMALL = VmSpec(
    domain=Domain(
        devices=Devices(
            disks=(Disk(name="root"), Disk(name="cloudinit", readonly=True)),
            interfaces=(Interface(name="default"),),
        )
    ),
    volumes=(ROOT, SEED),
    networks=(Network(name="default"),),
)
LARGE = VmSpec(
    domain=Domain(
        cpu=Cpu(
            sockets=2,
            cores=2,
            threads=2,
            model="EPYC",
            features=(CpuFeature(name="avx", policy="disable"),),
        ),
        memory=Memory(guest=4 * 2**30),
        firmware=Firmware(uuid="c3ecdb42-282e-44c3-8266-91b99ac91261", serial="A1.b-2"),
        devices=Devices(
            disks=(
                Disk(name="data", bus=DiskBus.SCSI, serial="data-1"),
                Disk(name="root", boot_order=1),
                Disk(name="more", bus=DiskBus.SATA),
                Disk(name="cloudinit", bus=DiskBus.SATA, device="cdrom"),
            ),
            interfaces=(Interface(name="a"), Interface(name="b")),
        ),
    ),
    volumes=(
        Volume(name="data", empty_disk=EmptyDisk(capacity=2**30)),
        ROOT,
        Volume(name="more", image=ImageVolume(ref="tiny")),
        SEED,
    ),
    networks=(Network(name="a"), Network(name="b", network="lan")),
)
BARE = VmSpec(domain=Domain(devices=Devices(disks=(Disk(name="root"),))), volumes=(ROOT,))
DISPLAY = VmSpec(
    domain=Domain(devices=Devices(disks=(Disk(name="root"),), autoattach_graphics_device=True)),
    volumes=(ROOT,),
)

GUARDED = VmSpec(
    domain=Domain(
        devices=Devices(
            disks=(Disk(name="root"),),
            interfaces=(Interface(name="default"),),
            watchdog=Watchdog(i6300esb=I6300esb(action="poweroff")),
        )
    ),
    volumes=(ROOT,),
    networks=(Network(name="default"),),
)
SMOKE = VmSpec(  # KubeVirt's walk-through: its guest looks for its disks in this order
    domain=Domain(
        memory=Memory(guest=4 * 10**9),
        firmware=Firmware(uuid="c3ecdb42-282e-44c3-8266-91b99ac91261"),
        devices=Devices(
            disks=tuple(Disk(name=n) for n in ("containerdisk", "emptydisk", "cloudinitdisk")),
            interfaces=(Interface(name="default"),),
        ),
    ),
    volumes=(
        Volume(name="containerdisk", container_disk=ContainerDisk(image="kubevirt/fedora:latest")),
        Volume(name="emptydisk", empty_disk=EmptyDisk(capacity=2 * 2**30)),
        Volume(name="cloudinitdisk", cloud_init_no_cloud=CloudInitNoCloud(hostname="web")),
    ),
    networks=(Network(name="default"),),
)
EVERY_BUS = VmSpec(
    domain=Domain(
        devices=Devices(
            disks=(
                Disk(name="root"),
                *(Disk(name=f"{bus}-{n}", bus=bus) for n in range(2) for bus in DiskBus),
            ),
            interfaces=(Interface(name="default"),),
        )
    ),
    volumes=(
        ROOT,
        *(
            Volume(name=f"{bus}-{n}", empty_disk=EmptyDisk(capacity=2**30))
            for n in range(2)
            for bus in DiskBus
        ),
    ),
    networks=(Network(name="default"),),
)
TUNED = VmSpec(
    domain=Domain.model_validate(
        {
            "cpu": {"cores": 2},
            "io_threads": {"policy": "auto"},
            "devices": {
                "disks": [
                    {
                        "name": "root",
                        "cache": "none",
                        "io": "native",
                        "detect_zeroes": "unmap",
                        "error_policy": "stop",
                        "read_error_policy": "report",
                        "limits": {
                            "bytes_per_s": "8MiB",
                            "read_iops": 100,
                            "write_iops": 50,
                            "burst": {"bytes_per_s": "64MiB", "read_iops": 200},
                            "burst_s": 5,
                        },
                    },
                    {"name": "log", "dedicated_io_thread": True, "cache": "directsync"},
                    {"name": "data", "bus": "scsi", "block_size": {"logical_bytes": 4096}},
                    {"name": "old", "bus": "sata", "block_size": {"physical_bytes": 4096}},
                    {"name": "stick", "bus": "usb", "discard": "ignore", "cache": "unsafe"},
                    {"name": "ring", "io": "io_uring", "cache": "writethrough"},
                ]
            },
        }
    ),
    volumes=(
        ROOT,
        *(
            Volume(name=name, empty_disk=EmptyDisk(capacity=2**30))
            for name in ("log", "data", "old", "stick", "ring")
        ),
    ),
)
SHARED = VmSpec(
    domain=Domain(
        devices=Devices(
            disks=tuple(
                Disk.model_validate({"name": name} | more)
                for name, more in (
                    *(("root", {}), ("file", {}), ("direct", {"cache": "directsync"})),
                    *(("device", {"bus": "scsi"}), ("server", {"bus": "scsi"})),
                )
            )
        )
    ),
    volumes=(
        ROOT,
        *(
            Volume(name=name, volume=NamedVolume(name=name))
            for name in ("file", "direct", "device", "server")
        ),
    ),
)


def shared(path: str, **more: Any) -> DiskSource:
    return DiskSource(path, ImageFormat.RAW, volume=True, shared=True, **more)


CASES = {
    "shared": inputs(
        SHARED,
        disks={
            "root": overlay("root"),
            "file": shared(f"/var/lib/virtbus/vms/{UID}/disk-file.raw"),
            "direct": shared(f"/var/lib/virtbus/vms/{UID}/disk-direct.raw"),
            "device": shared("/dev/disk/by-id/one", device_bytes=2**30),
            "server": shared(
                "",
                network=NetworkDisk(NbdPool(kind=PoolKind.NBD, host="192.0.2.9"), "export"),
            ),
        },
    ),
    "tuned": inputs(TUNED),
    "every-bus": inputs(EVERY_BUS),
    "kubevirt-smoke": inputs(SMOKE),
    "watchdog": inputs(GUARDED),
    "small": inputs(SMALL),
    "small-kvm": inputs(SMALL, accelerator="kvm"),
    "large": inputs(LARGE),
    "no-network": inputs(BARE),
    "display": inputs(DISPLAY),
    "ignition": inputs(
        BARE.model_copy(update={"ignition": Ignition()}),
        ignition=Path(f"/var/lib/virtbus/vms/{UID}/seed-ignition.json"),
    ),
    "bench": inputs(SMALL, skip_cpu_queries=True),
}


@pytest.mark.parametrize("name", CASES)
def test_domain_is_its_golden_file(name: str) -> None:
    text, path = render(CASES[name]), GOLDEN / f"{name}.xml"
    if os.environ.get("REGENERATE"):
        readable = ElementTree.fromstring(text)
        ElementTree.indent(readable)
        path.write_text(ElementTree.tostring(readable, encoding="unicode") + "\n")
    golden = ElementTree.canonicalize(path.read_text(), strip_text=True)
    assert ElementTree.canonicalize(text, strip_text=True) == golden


@pytest.mark.parametrize("name", CASES)
@pytest.mark.integration
def test_domain_is_valid_by_libvirts_own_schema(name: str) -> None:
    checked = subprocess.run(
        ["xmllint", "--noout", "--relaxng", str(SCHEMA), "-"],
        input=render(CASES[name]),
        text=True,
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_a_container_disk_is_an_overlay_to_boot_from_as_an_image_is() -> None:
    container = Volume(name="root", container_disk=ContainerDisk(image="quay.io/team/web:1"))
    spec = BARE.model_copy(update={"volumes": (container,)})
    assert render(inputs(spec)) == render(inputs(BARE))
    assert 'order="1"' in render(inputs(spec))


def test_a_drive_without_a_volume_is_empty_and_an_error_policy_is_the_drivers() -> None:
    drive = Disk(name="drive", bus=DiskBus.SATA, device="cdrom", error_policy=ErrorPolicy.STOP)
    xml = render(inputs(VmSpec(domain=Domain(devices=Devices(disks=(drive,))))))
    disk = xml[xml.index("<disk") : xml.index("</disk>")]
    assert 'device="cdrom"' in disk
    assert "<source" not in disk
    assert 'error_policy="stop"' in disk
    assert "<readonly" in disk


def test_no_two_disks_of_full_buses_share_an_address() -> None:
    disks = [Disk(name=f"{bus}-{n}", bus=bus) for bus in DiskBus for n in range(MAX_DISKS[bus])]
    spec = VmSpec(domain=Domain(devices=Devices.model_construct(disks=tuple(disks))))
    devices = ElementTree.fromstring(render(inputs(spec))).find("devices")
    assert devices is not None
    places = [
        (one.find("target").get("bus"), *sorted(address.items()))  # type: ignore[union-attr]
        for one in devices.findall("disk")
        if (address := one.find("address")) is not None
    ]
    assert len(places) == len(set(places)) == len(disks)
    ports = devices.findall("controller[@model='pcie-root-port']")
    assert len(ports) < 128


def test_an_nvme_disk_is_a_virtio_disk_with_another_driver_and_no_input_in_it() -> None:
    disks = (Disk(name="a", bus=DiskBus.NVME), Disk(name="b"), Disk(name="c", bus=DiskBus.NVME))
    spec = VmSpec(domain=Domain(devices=Devices(disks=disks)))
    root = ElementTree.fromstring(render(inputs(spec)))
    named = {one.find("serial").text: one.find("target").get("dev") for one in root.iter("disk")}  # type: ignore[union-attr]
    assert named == {"a": "vdb", "b": "vda", "c": "vdc"}
    (override,) = root.findall(f"{{{QEMU_NAMESPACE}}}override")
    assert [device.get("alias") for device in override] == ["ua-nvme-a", "ua-nvme-c"]
    properties = [dict(one.items()) for one in override.iter() if one.tag.endswith("property")]
    assert properties == [{"name": "driver", "type": "string", "value": "nvme"}] * 2
    assert "commandline" not in render(inputs(spec))


def test_nics_get_the_first_root_ports_and_no_device_shares_one() -> None:
    text = render(CASES["large"])
    nics = tuple(Interface(name=name) for name in "ab")
    assert [d["bus"] for d in nic_devices(nics, made(nics))] == ["pci.1", "pci.2"]
    assert 'bus="0x01"' not in text
    assert 'bus="0x02"' not in text
    assert text.count('bus="0x03"') == 1


def made(nics: Sequence[Interface], **more: Any) -> list[InterfaceStatus]:
    """The interfaces as netd reports them."""
    return [InterfaceStatus(name=nic.name, mac="02:00:00:00:00:01", **more) for nic in nics]


def test_a_nic_without_properties_is_the_device_of_the_first_release() -> None:
    nics = (Interface(name="a"),)
    assert nic_devices(nics, made(nics)) == (
        {"driver": "virtio-net-pci", "id": "vbnet0", "bus": "pci.1", "addr": "0x0", "romfile": ""},
    )


def test_properties_of_a_nic_become_properties_of_its_device() -> None:
    first = Interface(name="a", boot_order=2, acpi_index=7)
    (device,) = nic_devices((first,), made((first,), mtu=1400, queues=3))
    assert "romfile" not in device  # the guest may boot from it
    assert (device["bootindex"], device["acpi-index"], device["host_mtu"]) == (2, 7, 1400)
    assert (device["mq"], device["vectors"]) == (True, 8)
    old = Interface.model_validate({"name": "b", "model": "e1000e"})
    (device,) = nic_devices((old,), made((old,), mtu=1400))
    assert device["driver"] == "e1000e"
    assert "host_mtu" not in device


def test_the_first_image_boots_after_the_nics_with_an_order() -> None:
    for order, expected in ((None, "1"), (4, "5")):
        nics = (Interface(name="a", boot_order=order), Interface(name="b"))
        devices = Devices(disks=(Disk(name="root"), Disk(name="seed")), interfaces=nics)
        spec = VmSpec(domain=Domain(devices=devices), volumes=(ROOT,))
        root = ElementTree.fromstring(render(inputs(spec)))
        assert [one.get("order") for one in root.iter("boot")] == [expected]


def test_ports_used_plus_four_spare_are_there() -> None:
    # one NIC, two disks, virtio-serial, balloon, rng: six used
    assert render(CASES["small"]).count('model="pcie-root-port"') == 10


def test_metadata_comes_back_as_it_was_put() -> None:
    text = render(CASES["small"])
    start, end = text.index("<virtbus:vm"), text.index("</virtbus:vm>") + len("</virtbus:vm>")
    back = parse(text[start:end])
    assert back is not None
    assert (back.uid, back.epoch, back.power_epoch) == (UID, 1, 0)


def test_metadata_that_is_not_whole_counts_as_none() -> None:
    assert parse("<vm><uid>x</uid></vm>") is None
    assert parse("<vm") is None


def test_no_secret_reaches_the_domain() -> None:
    spec = SMALL.model_copy(
        update={
            "volumes": (
                ROOT,
                Volume(
                    name="cloudinit",
                    cloud_init_no_cloud=CloudInitNoCloud(user_data="CANARY", hostname="web"),
                ),
            )
        }
    )
    assert "CANARY" not in render(inputs(spec))


def test_values_are_only_ever_text_or_attributes() -> None:
    hostile = 'x"/></devices><devices>&<!ENTITY'
    odd = inputs(SMALL, console_socket=Path(hostile), emulator=hostile)
    assert "<!ENTITY" not in render(odd)
    assert render(odd).count("<devices>") == 1


def test_the_text_of_an_element_is_that_of_the_library() -> None:
    hostile = "a&b<c>\"d'e\r\n\t f ü]]>&amp;"
    element = el("a", el("b", hostile, x=hostile), el("c"), el("d", ""), type_=hostile, long_name=1)
    theirs = ElementTree.tostring(element, encoding="unicode")
    assert canonicalize(to_text(element)) == canonicalize(theirs)
    assert ElementTree.fromstring(to_text(element))[0].get("x") == hostile
