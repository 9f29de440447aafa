"""The machine that a guest sees, but for its devices: CPU, memory, clock, features, firmware."""

from typing import Literal

from virtbus.kubebridge.core.kubevirt.part import (
    Empty,
    Int32,
    Part,
    Quantity,
    Switch,
    Time,
    must,
    said,
)


class CpuFeature(Part):
    """A feature of the CPU."""

    name: str = must("Its name in QEMU.")
    policy: str | None = said("force, require (the default), optional, disable or forbid.")


class Numa(Part):
    """The guest's NUMA cells."""

    guestMappingPassthrough: Empty | None = said("As the host's; needs dedicated CPUs.")


class Realtime(Part):
    """CPUs scheduled in real time."""

    mask: str | None = said("Which vCPUs, such as 0-3,^1; none: all.")


class Cpu(Part):
    """How many CPUs the guest has, and which. vCPUs are sockets x cores x threads."""

    cores: Int32 | None = said("Cores in each socket (1).")
    dedicatedCpuPlacement: bool | None = said("Each vCPU has a CPU of the host to itself.")
    features: list[CpuFeature] | None = said("Features that the model gets or loses.")
    isolateEmulatorThread: bool | None = said("One more CPU for the emulator itself.")
    maxSockets: Int32 | None = said("As many sockets as may be plugged in while it runs.")
    model: str | None = said("host-model (the default), host-passthrough, or a model of QEMU's.")
    numa: Numa | None = said("The guest's NUMA cells.")
    realtime: Realtime | None = said("Schedule vCPUs in real time.")
    sockets: Int32 | None = said("Sockets (1).")
    threads: Int32 | None = said("Threads in each core (1).")


class Hugepages(Part):
    """Memory in large pages."""

    pageSize: str | None = said("2Mi or 1Gi.")


class ReservedOverhead(Part):
    """Memory for the emulator beside the guest's."""

    addedOverhead: Quantity | None = said("More than is reckoned.")
    memLock: Literal["NotRequired", "Required"] | None = said("Whether memory must be locked.")


class Memory(Part):
    """The guest's memory."""

    guest: Quantity | None = said("What the guest sees; by default the request in resources.")
    hugepages: Hugepages | None = said("Large pages back it.")
    maxGuest: Quantity | None = said("As much as may be plugged in while it runs.")
    reservedOverhead: ReservedOverhead | None = said("Memory for the emulator beside it.")


class Timer(Part):
    """A timer without ticks to catch up."""

    present: bool | None = said("Whether the guest has it (true).")


class TickTimer(Timer):
    """A timer, and what becomes of ticks that the guest missed."""

    tickPolicy: str | None = said("delay, catchup, merge or discard, as the timer knows it.")


class RtcTimer(TickTimer):
    """The real-time clock."""

    track: str | None = said("guest or wall.")


class Timers(Part):
    """The guest's timers."""

    hpet: TickTimer | None = said("High precision event timer.")
    hyperv: Timer | None = said("Hyper-V's clock, for Windows.")
    kvm: Timer | None = said("KVM's clock.")
    pit: TickTimer | None = said("Programmable interval timer.")
    rtc: RtcTimer | None = said("Real-time clock.")


class Utc(Part):
    """The guest's clock is UTC."""

    offsetSeconds: int | None = said("Seconds beside UTC.")


class Clock(Part):
    """The guest's clock: utc or timezone."""

    timer: Timers | None = said("Its timers.")
    timezone: str | None = said("The clock shows the time of this zone, such as Europe/Berlin.")
    utc: Utc | None = said("The clock shows UTC.")


class Apic(Switch):
    """The interrupt controller."""

    endOfInterrupt: bool | None = said("Tell the host of the end of interrupts.")


class Spinlocks(Switch):
    """How often a guest spins before it tells."""

    spinlocks: Int32 | None = said("Retries, at least 4096 (the default).")


class SynicTimer(Switch):
    """Synthetic timers."""

    direct: Switch | None = said("Deliver them directly.")


class TlbFlush(Switch):
    """Flushes of address translations by the host."""

    direct: Switch | None = said("Also for nested guests.")
    extended: Switch | None = said("Also of single addresses.")


class VendorId(Switch):
    """The hypervisor's name as the guest sees it."""

    vendorid: str | None = said("Up to twelve characters.")


class Hyperv(Part):
    """What Hyper-V offers Windows, one by one."""

    evmcs: Switch | None = said("Enlightened VMCS, for nested guests.")
    frequencies: Switch | None = said("Tell the frequencies of TSC and APIC.")
    ipi: Switch | None = said("Interrupts between CPUs by the host.")
    reenlightenment: Switch | None = said("Tell when the TSC's frequency changes.")
    relaxed: Switch | None = said("No watchdog bites while the host is busy.")
    reset: Switch | None = said("Reset by a register.")
    runtime: Switch | None = said("Tell how long each CPU ran.")
    spinlocks: Spinlocks | None = said("Tell the host of long spins.")
    synic: Switch | None = said("Synthetic interrupt controller.")
    synictimer: SynicTimer | None = said("Synthetic timers.")
    tlbflush: TlbFlush | None = said("Flush address translations by the host.")
    vapic: Switch | None = said("Virtual APIC.")
    vendorid: VendorId | None = said("The hypervisor's name.")
    vpindex: Switch | None = said("Tell each CPU its index.")


class KvmFeature(Part):
    """KVM's own signs."""

    hidden: bool | None = said("Hide from the guest that it runs on KVM.")


class Features(Part):
    """What the hypervisor offers the guest."""

    acpi: Switch | None = said("ACPI; without it, no soft shutdown.")
    apic: Apic | None = said("The interrupt controller.")
    hyperv: Hyperv | None = said("What Hyper-V offers Windows.")
    hypervPassthrough: Switch | None = said("All of Hyper-V's that the host can.")
    kvm: KvmFeature | None = said("KVM's own signs.")
    pvspinlock: Switch | None = said("Spinlocks that the host knows of.")
    smm: Switch | None = said("System management mode; secure boot needs it.")


class AcpiTables(Part):
    """Tables from volumes that are Secrets."""

    msdmNameRef: str | None = said("The volume with the MSDM table.")
    slicNameRef: str | None = said("The volume with the SLIC table.")


class Bios(Part):
    """SeaBIOS."""

    useSerial: bool | None = said("Its messages go to the serial console.")


class Efi(Part):
    """OVMF."""

    persistent: bool | None = said("Its variables outlive the VMI.")
    secureBoot: bool | None = said("Only signed loaders start (true); needs features.smm.")


class Bootloader(Part):
    """What the machine starts: bios (the default) or efi."""

    bios: Bios | None = said("SeaBIOS.")
    efi: Efi | None = said("OVMF.")


class KernelContainer(Part):
    """A kernel out of a container image."""

    image: str = must("The image.")
    imagePullPolicy: str | None = said("Always, IfNotPresent or Never.")
    imagePullSecret: str | None = said("A Secret with the registry's login.")
    initrdPath: str | None = said("The initrd's path in the image.")
    kernelPath: str | None = said("The kernel's path in the image.")


class KernelBoot(Part):
    """A kernel that is started without a boot loader."""

    container: KernelContainer | None = said("Where it comes from.")
    kernelArgs: str | None = said("Its command line.")


class Firmware(Part):
    """What starts the machine, and who it says it is."""

    acpi: AcpiTables | None = said("ACPI tables of the vendor's.")
    bootloader: Bootloader | None = said("BIOS or EFI.")
    kernelBoot: KernelBoot | None = said("A kernel in place of a boot loader.")
    serial: str | None = said("The system's serial number.")
    uuid: str | None = said("The system's UUID, which cloud-init takes for its instance id.")


class Chassis(Part):
    """The chassis, as SMBIOS tells the guest."""

    asset: str | None = said("Asset tag.")
    manufacturer: str | None = said("Manufacturer.")
    serial: str | None = said("Serial number.")
    sku: str | None = said("SKU number.")
    version: str | None = said("Version.")


class Machine(Part):
    """The machine's type."""

    type: str | None = said("q35 (the default on amd64), pc-q35-..., virt.")


class IoThreads(Part):
    """Threads for disks."""

    supplementalPoolThreadCount: Int32 | None = said("How many, with supplementalPool.")


class SevPolicy(Part):
    """What the firmware holds the host to."""

    encryptedState: bool | None = said("Registers are encrypted too (SEV-ES).")


class Sev(Part):
    """AMD's encrypted memory."""

    attestation: Empty | None = said("Start only after the owner has looked at the measurement.")
    dhCert: str | None = said("The owner's Diffie-Hellman key, Base64.")
    policy: SevPolicy | None = said("What the firmware holds the host to.")
    session: str | None = said("The owner's session, Base64.")


class LaunchSecurity(Part):
    """A guest whose memory its host cannot read; one of them."""

    sev: Sev | None = said("AMD SEV.")
    snp: Empty | None = said("AMD SEV-SNP.")
    tdx: Empty | None = said("Intel TDX.")


class CpuTopology(Part):
    """CPUs as they are."""

    cores: Int32 | None = said("Cores in each socket.")
    sockets: Int32 | None = said("Sockets.")
    threads: Int32 | None = said("Threads in each core.")


class Condition(Part):
    """One thing that is so, is not so, or is not known."""

    lastProbeTime: Time | None = said("When it was last looked at.", nullable=True)
    lastTransitionTime: Time | None = said("Since when it is so.", nullable=True)
    message: str | None = said("Why, for people.")
    reason: str | None = said("Why, in a word.")
    status: str = must("True, False or Unknown.")
    type: str = must("What.")
