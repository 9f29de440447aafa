"""Defines models of the guest's devices: disks, network interfaces, and other devices."""

from virtbus.documents.crds.models.part import Empty, Int32, Part, Switch, must, said
from virtbus.documents.crds.models.pods import ATOMIC


class DiskTarget(Part):
    """A hard disk."""

    bus: str | None = said("Bus of the disk: virtio, sata, scsi or usb.")
    pciAddress: str | None = said("PCI address of the disk, such as 0000:81:01.10.")
    readonly: bool | None = said("If true, the guest cannot write to the disk.")


class CdRomTarget(Part):
    """A CD-ROM drive."""

    bus: str | None = said("Bus of the drive: sata (the default) or scsi.")
    readonly: bool | None = said("Must be true, because a CD-ROM is read-only.")
    tray: str | None = said("State of the tray: closed (the default) or open.")


class LunTarget(Part):
    """A SCSI device that executes the guest's SCSI commands."""

    bus: str | None = said("Bus of the device: scsi.")
    readonly: bool | None = said("If true, the guest cannot write to the device.")
    reservation: bool | None = said("Allow SCSI persistent reservations.")


class CustomBlockSize(Part):
    """Block sizes in bytes."""

    discardGranularity: int | None = said("Smallest unit of a discard, in bytes.")
    logical: int | None = said("Logical block size: 512 bytes to 2 MiB.")
    physical: int | None = said("Physical block size in bytes.")


class BlockSize(Part):
    """The block size that the guest sees."""

    custom: CustomBlockSize | None = said("Use the given block sizes.")
    matchVolume: Switch | None = said("Use the block size of the volume.")


class Disk(Part):
    """A disk of the guest: disk, cdrom or lun. The volume of the same name holds its content."""

    blockSize: BlockSize | None = said("Block size that the guest sees.")
    bootOrder: int | None = said(
        "Position in the boot order; 1 is first. Disks and interfaces share one sequence "
        "without duplicates."
    )
    cache: str | None = said("Cache mode of the disk: none, writethrough or writeback.")
    cdrom: CdRomTarget | None = said("Attach the volume as a CD-ROM drive.")
    changedBlockTracking: bool | None = said("Track changed blocks for incremental backups.")
    dedicatedIOThread: bool | None = said("Give the disk an I/O thread of its own.")
    disk: DiskTarget | None = said("Attach the volume as a hard disk.")
    errorPolicy: str | None = said(
        "Reaction to an I/O error: stop (the default), ignore, report or enospace."
    )
    io: str | None = said("I/O mode of QEMU: native or threads.")
    lun: LunTarget | None = said("Attach the volume as a SCSI device.")
    name: str = must("Name of the disk and of its volume.")
    serial: str | None = said("Serial number of the disk. The guest can find the disk by it.")
    shareable: bool | None = said("Allow several VMs to write to the disk.")
    tag: str | None = said("Tag of the disk in the metadata of cloud-init.")


class InterfaceBinding(Part):
    """A network binding plugin."""

    name: str = must("Name under which the plugin is registered.")


class DhcpPrivateOption(Part):
    """A private DHCP option."""

    option: int = must("Number of the option: 224 to 254.")
    value: str = must("Value of the option.")


class DhcpOptions(Part):
    """Options in the DHCP answer to the guest."""

    bootFileName: str | None = said("Boot file name (option 67).")
    ntpServers: list[str] | None = said("Addresses of NTP servers (option 42).")
    privateOptions: list[DhcpPrivateOption] | None = said("Private options (224 to 254).")
    tftpServerName: str | None = said("Name of the TFTP server (option 66).")


class Port(Part):
    """A port of the guest that masquerade forwards."""

    name: str | None = said("Name of the port.")
    port: Int32 = must("Number of the port: 1 to 65535.")
    protocol: str | None = said("Protocol of the port: TCP (the default) or UDP.")


class PortRange(Part):
    """A range of forwarded ports."""

    end: Int32 = must("Last port of the range.")
    protocol: str = must("Protocol of the ports: TCP or UDP.")
    start: Int32 = must("First port of the range.")


class Interface(Part):
    """A network interface. One binding connects it to the network of the same name."""

    acpiIndex: int | None = said(
        "ACPI index of the interface. The guest may derive the interface's name from it."
    )
    binding: InterfaceBinding | None = said("Connect the interface by a binding plugin.")
    bootOrder: int | None = said(
        "Position in the boot order; 1 is first. Disks and interfaces share one sequence "
        "without duplicates."
    )
    bridge: Empty | None = said(
        "Connect by a Linux bridge: the guest itself has the address of the network."
    )
    dhcpOptions: DhcpOptions | None = said("Options in the DHCP answer to the guest.")
    macAddress: str | None = said(
        "MAC address of the interface. The default is a generated address."
    )
    macvtap: Empty | None = said("Deprecated. KubeVirt has removed this binding.")
    masquerade: Empty | None = said("Connect by NAT: the guest shares the address of the pod.")
    model: str | None = said(
        "Device model: virtio (the default), e1000, e1000e, igb, ne2k_pci, pcnet or rtl8139."
    )
    name: str = must("Name of the interface and of its network.")
    passt: Empty | None = said("Deprecated. KubeVirt has removed this binding.")
    passtBinding: Empty | None = said("Connect by passt, a user-space network process.")
    pciAddress: str | None = said("PCI address of the interface, such as 0000:81:01.10.")
    portRanges: list[PortRange] | None = said(
        "Ranges of ports that are forwarded to the guest.", **ATOMIC
    )
    ports: list[Port] | None = said("Ports that are forwarded to the guest. The default is all.")
    slirp: Empty | None = said("Deprecated. KubeVirt has removed this binding.")
    sriov: Empty | None = said("Pass an SR-IOV virtual function through to the guest.")
    state: str | None = said(
        "State of the interface: up (the default), down, or absent to unplug it."
    )
    tag: str | None = said("Tag of the interface in the metadata of cloud-init.")


class Filesystem(Part):
    """A volume that is shared with the guest as a file system."""

    name: str = must("Name of the volume.")
    virtiofs: Empty = must("Share the volume by virtiofs.")


class RamFb(Part):
    """A simple framebuffer that works before the guest's driver is loaded."""

    enabled: bool | None = said("Turns the framebuffer on or off. The default is true.")


class VgpuDisplay(Part):
    """The display of a vGPU."""

    enabled: bool | None = said("Turns the display on or off. The default is true.")
    ramFB: RamFb | None = said("Framebuffer that works before the guest's driver is loaded.")


class VgpuOptions(Part):
    """Options of a vGPU."""

    display: VgpuDisplay | None = said("Display of the vGPU.")


class HostDevice(Part):
    """A host device that is passed through to the guest."""

    claimName: str | None = said("Name of an entry in resourceClaims.")
    deviceName: str | None = said("Name of the device resource in the cluster.")
    name: str = must("Name of the device in this VM.")
    requestName: str | None = said("Name of the request in the ResourceClaim.")
    tag: str | None = said("Tag of the device in the metadata of cloud-init.")


class Gpu(HostDevice):
    """A GPU that is passed through to the guest."""

    virtualGPUOptions: VgpuOptions | None = said("Options of a vGPU.")


class Input(Part):
    """An input device."""

    bus: str | None = said("Bus of the device: usb (the default) or virtio.")
    name: str = must("Name of the device.")
    type: str = must("Type of the device: tablet.")


class PanicDevice(Part):
    """A device by which a guest reports a crash."""

    model: str | None = said("Model of the device: hyperv, isa or pvpanic.")


class Sound(Part):
    """A sound card."""

    model: str | None = said("Model of the sound card: ich9 (the default) or ac97.")
    name: str = must("Name of the sound card.")


class Tpm(Part):
    """An emulated TPM 2.0."""

    enabled: bool | None = said(
        "Turns the TPM on or off. The default is true if this object is given."
    )
    persistent: bool | None = said(
        "Keep the state of the TPM after the VirtualMachineInstance ends."
    )


class Video(Part):
    """The video adapter."""

    type: str | None = said("Type of the adapter: virtio, vga, bochs, cirrus or ramfb.")


class WatchdogModel(Part):
    """A watchdog of one model."""

    action: str | None = said(
        "Action if the guest does not reset the watchdog: reset (the default), poweroff or "
        "shutdown."
    )


class Watchdog(Part):
    """A watchdog timer that the guest must reset: i6300esb or diag288."""

    diag288: WatchdogModel | None = said("Watchdog model of s390x.")
    i6300esb: WatchdogModel | None = said("Watchdog model of all other architectures.")
    name: str = must("Name of the watchdog.")


class Devices(Part):
    """The guest's devices."""

    autoattachGraphicsDevice: bool | None = said(
        "Attach a graphics device with a VNC console. The default is true."
    )
    autoattachInputDevice: bool | None = said(
        "Attach a tablet as input device. The default is false."
    )
    autoattachMemBalloon: bool | None = said(
        "Attach a memory balloon, which reports memory statistics. The default is true."
    )
    autoattachPodInterface: bool | None = said(
        "Attach an interface to the pod network if none is given. The default is true."
    )
    autoattachSerialConsole: bool | None = said("Attach a serial console. The default is true.")
    autoattachVSOCK: bool | None = said(
        "Attach a VSOCK device, which connects guest and host. The default is false."
    )
    blockMultiQueue: bool | None = said("Give each disk one queue per vCPU.")
    clientPassthrough: Empty | None = said("Allow USB redirection from a client.")
    disableHotplug: bool | None = said("Turn off hotplug of devices.")
    disks: list[Disk] | None = said("Disks of the guest, in the guest's order.", max_length=256)
    downwardMetrics: Empty | None = said(
        "Attach a serial port on which the guest reads metrics of its host."
    )
    filesystems: list[Filesystem] | None = said(
        "Volumes that are shared with the guest as file systems.", **ATOMIC
    )
    gpus: list[Gpu] | None = said("GPUs that are passed through to the guest.", **ATOMIC)
    hostDevices: list[HostDevice] | None = said(
        "Host devices that are passed through to the guest.", **ATOMIC
    )
    inputs: list[Input] | None = said("Input devices.")
    interfaces: list[Interface] | None = said("Network interfaces of the guest.", max_length=256)
    logSerialConsole: bool | None = said("Keep a log of the serial console.")
    networkInterfaceMultiqueue: bool | None = said("Give each interface one queue per vCPU.")
    panicDevices: list[PanicDevice] | None = said("Devices by which the guest reports a crash.")
    rng: Empty | None = said("Attach a random number generator that the host feeds.")
    sound: Sound | None = said("Sound card.")
    tpm: Tpm | None = said("TPM 2.0 device.")
    useVirtioTransitional: bool | None = said(
        "Use transitional virtio devices, which old guests need."
    )
    video: Video | None = said("Video adapter.")
    watchdog: Watchdog | None = said("Watchdog timer that the guest must reset.")
