"""The guest's devices: disks, network interfaces, and the rest."""

from virtbus.kubebridge.core.kubevirt.part import Empty, Int32, Part, Switch, must, said
from virtbus.kubebridge.core.kubevirt.pods import ATOMIC


class DiskTarget(Part):
    """A hard disk."""

    bus: str | None = said("virtio, sata, scsi or usb.")
    pciAddress: str | None = said("Where on the PCI bus, such as 0000:81:01.10.")
    readonly: bool | None = said("The guest cannot write.")


class CdRomTarget(Part):
    """A CD-ROM drive."""

    bus: str | None = said("sata (the default) or scsi.")
    readonly: bool | None = said("True, as a CD-ROM is.")
    tray: str | None = said("closed (the default) or open.")


class LunTarget(Part):
    """A SCSI device that takes the guest's own SCSI commands."""

    bus: str | None = said("scsi.")
    readonly: bool | None = said("The guest cannot write.")
    reservation: bool | None = said("The guest may reserve it for itself.")


class CustomBlockSize(Part):
    """Sizes of a block, in bytes."""

    discardGranularity: int | None = said("What is discarded at once.")
    logical: int | None = said("What is addressed: 512 to 2 Mi.")
    physical: int | None = said("What is written at once.")


class BlockSize(Part):
    """How large a disk's blocks seem."""

    custom: CustomBlockSize | None = said("As given.")
    matchVolume: Switch | None = said("As those of the volume.")


class Disk(Part):
    """A disk: disk, cdrom or lun, filled by the volume of the same name."""

    blockSize: BlockSize | None = said("How large its blocks seem.")
    bootOrder: int | None = said("1 is tried first; each number once, over disks and interfaces.")
    cache: str | None = said("none, writethrough or writeback.")
    cdrom: CdRomTarget | None = said("The guest sees a CD-ROM drive.")
    changedBlockTracking: bool | None = said("Note which blocks change, for backups.")
    dedicatedIOThread: bool | None = said("A thread of its own.")
    disk: DiskTarget | None = said("The guest sees a hard disk.")
    errorPolicy: str | None = said("stop (the default), ignore, report or enospace.")
    io: str | None = said("native or threads.")
    lun: LunTarget | None = said("The guest sees a SCSI device.")
    name: str = must("Its volume's name.")
    serial: str | None = said("Its serial number, by which the guest finds it.")
    shareable: bool | None = said("Several VMs may write it.")
    tag: str | None = said("A word about it in cloud-init's metadata.")


class InterfaceBinding(Part):
    """A binding plug-in."""

    name: str = must("As it was registered.")


class DhcpPrivateOption(Part):
    """A DHCP option of one's own."""

    option: int = must("224 to 254.")
    value: str = must("Its value.")


class DhcpOptions(Part):
    """What the guest is told by DHCP beside its address."""

    bootFileName: str | None = said("Option 67.")
    ntpServers: list[str] | None = said("Option 42.")
    privateOptions: list[DhcpPrivateOption] | None = said("Options 224 to 254.")
    tftpServerName: str | None = said("Option 66.")


class Port(Part):
    """A port of the guest that is forwarded, with masquerade."""

    name: str | None = said("A name for it.")
    port: Int32 = must("1 to 65535.")
    protocol: str | None = said("TCP (the default) or UDP.")


class PortRange(Part):
    """Ports from the first to the last."""

    end: Int32 = must("The last.")
    protocol: str = must("TCP or UDP.")
    start: Int32 = must("The first.")


class Interface(Part):
    """A network interface, joined to the network of the same name by one binding."""

    acpiIndex: int | None = said("Its index, after which the guest may name it.")
    binding: InterfaceBinding | None = said("Joined by a plug-in.")
    bootOrder: int | None = said("1 is tried first; each number once, over disks and interfaces.")
    bridge: Empty | None = said("The guest has the network's address itself.")
    dhcpOptions: DhcpOptions | None = said("What it is told by DHCP.")
    macAddress: str | None = said("Its MAC address; by default one is made.")
    macvtap: Empty | None = said("Of old; KubeVirt has it no more.")
    masquerade: Empty | None = said("The guest is behind its network's address.")
    model: str | None = said("virtio (the default), e1000, e1000e, igb, ne2k_pci, pcnet, rtl8139.")
    name: str = must("Its network's name.")
    passt: Empty | None = said("Of old; KubeVirt has it no more.")
    passtBinding: Empty | None = said("Joined by a process of the user's.")
    pciAddress: str | None = said("Where on the PCI bus, such as 0000:81:01.10.")
    portRanges: list[PortRange] | None = said("Ports that are forwarded.", **ATOMIC)
    ports: list[Port] | None = said("Ports that are forwarded; none: all.")
    slirp: Empty | None = said("Of old; KubeVirt has it no more.")
    sriov: Empty | None = said("A function of the network card itself.")
    state: str | None = said("up (the default), down, or absent: unplugged.")
    tag: str | None = said("A word about it in cloud-init's metadata.")


class Filesystem(Part):
    """A folder of a volume's, shared with the guest."""

    name: str = must("Its volume's name.")
    virtiofs: Empty = must("By virtiofs.")


class RamFb(Part):
    """A screen before the driver is there."""

    enabled: bool | None = said("On (the default) or off.")


class VgpuDisplay(Part):
    """A vGPU's screen."""

    enabled: bool | None = said("On (the default) or off.")
    ramFB: RamFb | None = said("A screen before the driver is there.")


class VgpuOptions(Part):
    """What a vGPU does."""

    display: VgpuDisplay | None = said("Its screen.")


class HostDevice(Part):
    """A device of the host's."""

    claimName: str | None = said("One of resourceClaims.")
    deviceName: str | None = said("What the cluster calls such devices.")
    name: str = must("A name for it.")
    requestName: str | None = said("The claim's request.")
    tag: str | None = said("A word about it in cloud-init's metadata.")


class Gpu(HostDevice):
    """A GPU of the host's."""

    virtualGPUOptions: VgpuOptions | None = said("For one that is shared.")


class Input(Part):
    """An input device."""

    bus: str | None = said("usb (the default) or virtio.")
    name: str = must("A name for it.")
    type: str = must("tablet.")


class PanicDevice(Part):
    """By which a guest tells that it crashed."""

    model: str | None = said("hyperv, isa or pvpanic.")


class Sound(Part):
    """A sound card."""

    model: str | None = said("ich9 (the default) or ac97.")
    name: str = must("A name for it.")


class Tpm(Part):
    """An emulated TPM 2.0."""

    enabled: bool | None = said("On (the default where it is given) or off.")
    persistent: bool | None = said("What it holds outlives the VMI.")


class Video(Part):
    """The screen's adapter."""

    type: str | None = said("virtio, vga, bochs, cirrus or ramfb.")


class WatchdogModel(Part):
    """A watchdog's kind."""

    action: str | None = said("When it bites: reset (the default), poweroff or shutdown.")


class Watchdog(Part):
    """A clock that the guest must wind; i6300esb or diag288."""

    diag288: WatchdogModel | None = said("For s390x.")
    i6300esb: WatchdogModel | None = said("For the rest.")
    name: str = must("A name for it.")


class Devices(Part):
    """The guest's devices."""

    autoattachGraphicsDevice: bool | None = said("A screen, by VNC (true).")
    autoattachInputDevice: bool | None = said("A tablet (false).")
    autoattachMemBalloon: bool | None = said("A balloon, by which memory is counted (true).")
    autoattachPodInterface: bool | None = said("An interface where none is given (true).")
    autoattachSerialConsole: bool | None = said("A serial console (true).")
    autoattachVSOCK: bool | None = said("A socket to the host (false).")
    blockMultiQueue: bool | None = said("A queue for each vCPU, for disks.")
    clientPassthrough: Empty | None = said("USB devices of the client's.")
    disableHotplug: bool | None = said("Nothing can be plugged in.")
    disks: list[Disk] | None = said("Disks, in the guest's order.", max_length=256)
    downwardMetrics: Empty | None = said("The host's metrics, by a serial port.")
    filesystems: list[Filesystem] | None = said("Folders shared with the guest.", **ATOMIC)
    gpus: list[Gpu] | None = said("GPUs of the host's.", **ATOMIC)
    hostDevices: list[HostDevice] | None = said("Devices of the host's.", **ATOMIC)
    inputs: list[Input] | None = said("Input devices.")
    interfaces: list[Interface] | None = said("Network interfaces.", max_length=256)
    logSerialConsole: bool | None = said("Keep what the serial console says.")
    networkInterfaceMultiqueue: bool | None = said("A queue for each vCPU, for interfaces.")
    panicDevices: list[PanicDevice] | None = said("By which a guest tells that it crashed.")
    rng: Empty | None = said("Random numbers of the host's.")
    sound: Sound | None = said("A sound card.")
    tpm: Tpm | None = said("A TPM.")
    useVirtioTransitional: bool | None = said("Virtio of old guests.")
    video: Video | None = said("The screen's adapter.")
    watchdog: Watchdog | None = said("A clock that the guest must wind.")
