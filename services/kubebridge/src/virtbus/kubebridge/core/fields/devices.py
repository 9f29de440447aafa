"""Declares the fields of the guest's devices: `spec.domain.devices`."""

import re

from virtbus.kubebridge.core.fields.row import (
    Field,
    FieldType,
    below,
    ignored,
    mapped,
    refused,
)

DEVICES = "domain.devices"
DISKS, NICS = f"{DEVICES}.disks[]", f"{DEVICES}.interfaces[]"
TO_DISK, TO_NIC = "spec.domain.devices.disks[]", "spec.domain.devices.interfaces[]"
TO_WATCHDOG = "spec.domain.devices.watchdog.i6300esb"
BUSES = ("virtio", "sata", "scsi", "usb")
MODELS = ("virtio", "e1000", "e1000e")
SPEED = "only the speed differs; each device has one queue"
POINTER = "a guest has only a PS/2 keyboard and mouse"
DISCONTINUED = "KubeVirt removed it in v1.3"
BRIDGE = "write bridge: {} or masquerade: {}"
PASST = "the process passt of the node connects it (Debian's package passt)"
PLACE = "devices are placed by virtbus"


def link_state(state: str) -> str | None:
    """Return a link's state for VmCreate; None for `absent`.

    VmCreate has no state `absent`: `translate` leaves out an absent interface, which unplugs the
    interface.
    """
    return None if state == "absent" else state


_DASHES = re.compile("[0-9A-Fa-f]{2}(-[0-9A-Fa-f]{2}){5}")
_DOTS = re.compile(r"[0-9A-Fa-f]{4}(\.[0-9A-Fa-f]{4}){2}")


def mac_address(value: str) -> str | None:
    """Return a MAC address of 6 octets in the notation with colons; None for an empty value.

    The notations with dashes and with dots are converted, because KubeVirt (Go's net.ParseMAC)
    accepts these notations. Any other value is returned unchanged: VmCreate refuses invalid values,
    and values of 8 or 20 octets.
    """
    if _DASHES.fullmatch(value) or _DOTS.fullmatch(value):
        digits = re.sub("[.-]", "", value)
        return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))
    return value or None


def _disk(path: str) -> Field:
    return mapped(
        path,
        FieldType.TEXT,
        f"{TO_DISK}.bus",
        values=BUSES,
        instead="write virtio, sata, scsi or usb",
    )


DISK = (
    below(DISKS, to=TO_DISK),
    mapped(f"{DISKS}.name", FieldType.TEXT, f"{TO_DISK}.name"),
    below(f"{DISKS}.disk"),
    _disk(f"{DISKS}.disk.bus"),
    mapped(f"{DISKS}.disk.readonly", FieldType.FLAG, f"{TO_DISK}.readonly"),
    refused(
        f"{DISKS}.disk.pciAddress", PLACE, "leave it out; disks keep the order of the manifest"
    ),
    below(
        f"{DISKS}.cdrom",
        "the device is a CD-ROM drive",
        to=f"{TO_DISK}.device",
        make=lambda _: "cdrom",
    ),
    _disk(f"{DISKS}.cdrom.bus"),
    mapped(
        f"{DISKS}.cdrom.readonly",
        FieldType.FLAG,
        "",
        "always true",
        values=(True,),
        instead="leave it out: a CD-ROM is read-only",
    ),
    mapped(
        f"{DISKS}.cdrom.tray",
        FieldType.TEXT,
        f"{TO_DISK}.tray",
        "`open`: the drive has no medium, on sata and scsi",
        make=lambda tray: None if tray == "closed" else tray,
        values=("closed", "open"),
        instead="write closed or open",
    ),
    refused(f"{DISKS}.lun", "no SCSI device is passed through", "use a disk"),
    mapped(
        f"{DISKS}.bootOrder",
        FieldType.NUMBER,
        f"{TO_DISK}.boot_order",
        "without any, the guest boots from the first disk with an image",
    ),
    mapped(
        f"{DISKS}.serial",
        FieldType.TEXT,
        f"{TO_DISK}.serial",
        pattern=r"[A-Za-z0-9_.-]{1,20}",
        instead="write 1-20 characters of A-Z, a-z, 0-9, '_', '.' and '-'",
    ),
    mapped(
        f"{DISKS}.cache",
        FieldType.TEXT,
        f"{TO_DISK}.cache",
        "the default is `writeback`; `none` if `io` is `native`. `none` needs a file system with"
        " direct I/O on the node",
        values=("none", "writethrough", "writeback"),
        instead="write none, writethrough or writeback",
    ),
    mapped(
        f"{DISKS}.io",
        FieldType.TEXT,
        f"{TO_DISK}.io",
        "`native` needs cache: none. `default` is `threads`",
        make=lambda mode: None if mode == "default" else mode,
        values=("native", "default", "threads"),
        instead="write native, default or threads",
    ),
    mapped(
        f"{DISKS}.errorPolicy",
        FieldType.TEXT,
        f"{TO_DISK}.error_policy",
        "the default is `enospace`: a full disk pauses the guest, and the guest sees other errors",
        values=("stop", "ignore", "report", "enospace"),
        instead="write stop, ignore, report or enospace",
    ),
    mapped(
        f"{DISKS}.dedicatedIOThread",
        FieldType.FLAG,
        f"{TO_DISK}.dedicated_io_thread",
        "true only on the bus virtio",
    ),
    refused(
        f"{DISKS}.shareable",
        "only a volume of the bus can be shared (ADR 0086), and no disk of a VMI is one",
        "leave it out",
    ),
    below(f"{DISKS}.blockSize"),
    below(f"{DISKS}.blockSize.custom", to=f"{TO_DISK}.block_size"),
    mapped(
        f"{DISKS}.blockSize.custom.logical",
        FieldType.NUMBER,
        f"{TO_DISK}.block_size.logical_bytes",
        "512 to 4096, a power of two; 512 on sata",
    ),
    mapped(
        f"{DISKS}.blockSize.custom.physical",
        FieldType.NUMBER,
        f"{TO_DISK}.block_size.physical_bytes",
        "512 to 2 MiB, a power of two",
    ),
    refused(
        f"{DISKS}.blockSize.custom.discardGranularity",
        "QEMU's own granularity is used",
        "leave it out",
    ),
    ignored(f"{DISKS}.blockSize.matchVolume", "the blocks of a volume's file have 512 bytes"),
    refused(f"{DISKS}.tag", "tags do not reach the guest's metadata", "use serial"),
    refused(f"{DISKS}.changedBlockTracking", "the bridge makes no backups yet", "leave it out"),
)

NIC = (
    below(NICS, to=TO_NIC),
    mapped(f"{NICS}.name", FieldType.TEXT, f"{TO_NIC}.name"),
    mapped(
        f"{NICS}.macAddress",
        FieldType.TEXT,
        f"{TO_NIC}.mac_address",
        "with colons, dashes or dots",
        make=mac_address,
    ),
    mapped(
        f"{NICS}.model",
        FieldType.TEXT,
        f"{TO_NIC}.model",
        values=MODELS,
        instead="write virtio, e1000 or e1000e",
    ),
    below(f"{NICS}.bridge", "a Linux bridge of the VM connects it to its network"),
    below(
        f"{NICS}.masquerade",
        "the guest is behind NAT, with KubeVirt's addresses; the VM's namespace has the address of"
        " the network",
        to=f"{TO_NIC}.binding",
        make=lambda _: "masquerade",
    ),
    below(
        f"{NICS}.macvtap",
        "only on a network of the kind macvtap (virtbus network create)",
        to=f"{TO_NIC}.binding",
        make=lambda _: "macvtap",
    ),
    refused(f"{NICS}.sriov", "no device is passed through", BRIDGE),
    below(f"{NICS}.binding", "KubeVirt's binding plugins; only passt is built in"),
    mapped(
        f"{NICS}.binding.name",
        FieldType.TEXT,
        f"{TO_NIC}.binding",
        "`passt`: as passtBinding",
        values=("passt",),
        instead="write passt, or bridge: {} or masquerade: {} in place of the plugin",
    ),
    *(
        below(f"{NICS}.{name}", PASST, to=f"{TO_NIC}.binding", make=lambda _: "passt")
        for name in ("passtBinding", "passt")
    ),
    refused(f"{NICS}.slirp", DISCONTINUED, BRIDGE),
    below(
        f"{NICS}.ports[]",
        "with masquerade and passt, only these are open, or all if none is listed; with other "
        "bindings, every port of a guest is reachable",
    ),
    mapped(f"{NICS}.ports[].name", FieldType.TEXT, "", "unique among the interface's ports"),
    mapped(f"{NICS}.ports[].port", FieldType.NUMBER, "", "1 to 65535"),
    mapped(
        f"{NICS}.ports[].protocol",
        FieldType.TEXT,
        "",
        "the default is TCP",
        values=("TCP", "UDP"),
        instead="write TCP or UDP",
    ),
    below(f"{NICS}.portRanges[]", "as ports"),
    mapped(f"{NICS}.portRanges[].start", FieldType.NUMBER, "", "1 to 65535"),
    mapped(f"{NICS}.portRanges[].end", FieldType.NUMBER, "", "not below start"),
    mapped(
        f"{NICS}.portRanges[].protocol",
        FieldType.TEXT,
        "",
        values=("TCP", "UDP"),
        instead="write TCP or UDP",
    ),
    mapped(
        f"{NICS}.state",
        FieldType.TEXT,
        f"{TO_NIC}.state",
        "`down`: no frame passes, and the guest sees no carrier; `absent`: it is unplugged",
        make=link_state,
        values=("up", "down", "absent"),
        instead="write up, down or absent",
    ),
    mapped(
        f"{NICS}.bootOrder",
        FieldType.NUMBER,
        f"{TO_NIC}.boot_order",
        "an order among disks and interfaces; the network must answer PXE",
    ),
    refused(f"{NICS}.pciAddress", PLACE, "use acpiIndex or macAddress to tell NICs apart"),
    mapped(
        f"{NICS}.acpiIndex",
        FieldType.NUMBER,
        f"{TO_NIC}.acpi_index",
        "1 to 16383, unique; Linux names the device eno<index>",
    ),
    refused(f"{NICS}.tag", "tags do not reach the guest's metadata", "use macAddress"),
    refused(
        f"{NICS}.dhcpOptions",
        "DHCP answers with the network's own options",
        "write them into cloud-init's network data",
    ),
)

OTHERS = (
    mapped(
        f"{DEVICES}.autoattachPodInterface",
        FieldType.FLAG,
        "",
        "unless it is false, a VM without networks has an interface on the default network",
    ),
    mapped(
        f"{DEVICES}.autoattachSerialConsole",
        FieldType.FLAG,
        "",
        "always on",
        values=(True,),
        instead="leave it out: every guest has a serial console",
    ),
    mapped(
        f"{DEVICES}.autoattachMemBalloon",
        FieldType.FLAG,
        "",
        "always on",
        values=(True,),
        instead="leave it out: every guest has a balloon",
    ),
    mapped(
        f"{DEVICES}.autoattachGraphicsDevice",
        FieldType.FLAG,
        "spec.domain.devices.autoattach_graphics_device",
        "a VGA display over VNC, unless it is false",
    ),
    below(f"{DEVICES}.video"),
    mapped(
        f"{DEVICES}.video.type",
        FieldType.TEXT,
        "",
        "always vga",
        values=("vga",),
        instead="leave it out: the display is VGA",
    ),
    below(f"{DEVICES}.watchdog"),
    mapped(f"{DEVICES}.watchdog.name", FieldType.TEXT, "", "a guest has at most one"),
    below(f"{DEVICES}.watchdog.i6300esb", to=TO_WATCHDOG),
    mapped(
        f"{DEVICES}.watchdog.i6300esb.action",
        FieldType.TEXT,
        f"{TO_WATCHDOG}.action",
        values=("poweroff", "reset", "shutdown"),
        instead="write poweroff, reset or shutdown",
    ),
    refused(f"{DEVICES}.watchdog.diag288", "it exists only on s390x", "use i6300esb"),
    below(f"{DEVICES}.panicDevices[]"),
    mapped(
        f"{DEVICES}.panicDevices[].model",
        FieldType.TEXT,
        "",
        "every guest has one",
        values=("isa",),
        instead="leave it out: every guest has one of the model isa",
    ),
    refused(f"{DEVICES}.autoattachInputDevice", POINTER, "leave it out"),
    refused(f"{DEVICES}.inputs[]", POINTER, "leave it out"),
    refused(f"{DEVICES}.autoattachVSOCK", "vsock is not supported", "use the network"),
    refused(f"{DEVICES}.sound", "sound is not supported", "leave it out"),
    refused(f"{DEVICES}.tpm", "a TPM is not supported", "leave it out"),
    refused(f"{DEVICES}.gpus[]", "no device is passed through", "leave it out"),
    refused(f"{DEVICES}.hostDevices[]", "no device is passed through", "leave it out"),
    refused(
        f"{DEVICES}.filesystems[]",
        "KubeVirt shares claims, Secrets and ConfigMaps of the VM's pod; there is no pod, and the"
        " bridge has no claims",
        "use disks of the kinds secret and configMap, or a VM pod with volumes",
    ),
    refused(f"{DEVICES}.clientPassthrough", "no USB device is redirected", "leave it out"),
    refused(f"{DEVICES}.downwardMetrics", "the host's metrics stay on the host", "leave it out"),
    refused(
        f"{DEVICES}.useVirtioTransitional",
        "devices use virtio 1",
        "leave it out, and use an image with Linux 4 or newer",
    ),
    below(f"{DEVICES}.rng", "every guest has a random number device"),
    ignored(f"{DEVICES}.logSerialConsole", "the node always keeps a bounded log of the console"),
    ignored(f"{DEVICES}.disableHotplug", "interfaces can be plugged into each running guest"),
    ignored(f"{DEVICES}.blockMultiQueue", SPEED),
    mapped(
        f"{DEVICES}.networkInterfaceMultiqueue",
        FieldType.FLAG,
        "",
        "true: each virtio interface has a queue for each vCPU, and at most 16",
    ),
)

ALL = (below(DEVICES), *DISK, *NIC, *OTHERS)
