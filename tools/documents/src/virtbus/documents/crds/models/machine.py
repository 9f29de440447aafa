"""Defines models of the guest's CPU, memory, clock, features and firmware."""

from typing import Literal

from virtbus.documents.crds.models.part import (
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
    """A feature flag of the CPU model."""

    name: str = must("Name of the CPU feature as QEMU knows it.")
    policy: str | None = said(
        "Policy of the feature: force, require (the default), optional, disable or forbid."
    )


class Numa(Part):
    """The guest's NUMA topology."""

    guestMappingPassthrough: Empty | None = said(
        "Map the host's NUMA topology to the guest. Needs dedicated CPUs and hugepages."
    )


class Realtime(Part):
    """Real-time scheduling of vCPUs."""

    mask: str | None = said("vCPUs with real-time scheduling, such as 0-3,^1. The default is all.")


class Cpu(Part):
    """The guest's CPUs. The number of vCPUs is sockets x cores x threads."""

    cores: Int32 | None = said("Cores of each socket. The default is 1.")
    dedicatedCpuPlacement: bool | None = said("Pin each vCPU to a host CPU that nothing else uses.")
    features: list[CpuFeature] | None = said(
        "Features that are added to the CPU model or removed from it."
    )
    isolateEmulatorThread: bool | None = said("Reserve one more host CPU for the emulator thread.")
    maxSockets: Int32 | None = said("Largest number of sockets that hotplug can reach.")
    model: str | None = said(
        "CPU model: host-model (the default), host-passthrough, or the name of a QEMU model."
    )
    numa: Numa | None = said("NUMA topology of the guest.")
    realtime: Realtime | None = said("Real-time scheduling of vCPUs.")
    sockets: Int32 | None = said("Number of sockets. The default is 1.")
    threads: Int32 | None = said("Threads of each core. The default is 1.")


class Hugepages(Part):
    """Huge pages for the guest's memory."""

    pageSize: str | None = said("Size of a huge page, such as 2Mi or 1Gi.")


class ReservedOverhead(Part):
    """Memory for the emulator in addition to the guest's memory."""

    addedOverhead: Quantity | None = said("Memory in addition to the computed overhead.")
    memLock: Literal["NotRequired", "Required"] | None = said(
        "Tells if the memory is locked: NotRequired or Required."
    )


class Memory(Part):
    """The guest's memory."""

    guest: Quantity | None = said("Memory that the guest sees. The default is the memory request.")
    hugepages: Hugepages | None = said("Back the guest's memory with huge pages.")
    maxGuest: Quantity | None = said("Largest memory that hotplug can reach.")
    reservedOverhead: ReservedOverhead | None = said(
        "Memory for the emulator in addition to the guest's memory."
    )


class Timer(Part):
    """A timer of the guest."""

    present: bool | None = said("Tells if the guest has this timer. The default is true.")


class TickTimer(Timer):
    """A timer with a policy for missed ticks."""

    tickPolicy: str | None = said(
        "Policy for missed ticks: delay, catchup, merge or discard. Not every timer has all "
        "of them."
    )


class RtcTimer(TickTimer):
    """The real-time clock."""

    track: str | None = said("Clock that the timer follows: guest or wall.")


class Timers(Part):
    """The guest's timers."""

    hpet: TickTimer | None = said("High precision event timer.")
    hyperv: Timer | None = said("Reference clock of Hyper-V, for Windows guests.")
    kvm: Timer | None = said("KVM's paravirtual clock.")
    pit: TickTimer | None = said("Programmable interval timer.")
    rtc: RtcTimer | None = said("Real-time clock.")


class Utc(Part):
    """A guest clock in UTC."""

    offsetSeconds: int | None = said("Offset from UTC in seconds.")


class Clock(Part):
    """The guest's clock, in UTC or in a time zone."""

    timer: Timers | None = said("Timers of the guest.")
    timezone: str | None = said("Time zone of the guest's clock, such as Europe/Berlin.")
    utc: Utc | None = said("Run the guest's clock in UTC.")


class Apic(Switch):
    """The guest's interrupt controller (APIC)."""

    endOfInterrupt: bool | None = said(
        "Notify the host of the end of an interrupt by shared memory, without a VM exit."
    )


class Spinlocks(Switch):
    """Hyper-V enlightenment for spinlocks."""

    spinlocks: Int32 | None = said(
        "Number of spins before the guest notifies the host. The default and the minimum are 4096."
    )


class SynicTimer(Switch):
    """Hyper-V's synthetic timers."""

    direct: Switch | None = said("Deliver timer expirations directly as interrupts.")


class TlbFlush(Switch):
    """Hyper-V's TLB flushes by the hypervisor."""

    direct: Switch | None = said(
        "Also flush for nested guests, without an exit to the outer hypervisor."
    )
    extended: Switch | None = said("Allow a flush of single address ranges.")


class VendorId(Switch):
    """The hypervisor's vendor id that the guest sees."""

    vendorid: str | None = said("Vendor id of up to 12 characters.")


class Hyperv(Part):
    """Hyper-V enlightenments for Windows guests."""

    evmcs: Switch | None = said("Enlightened VMCS, which makes nested virtualization faster.")
    frequencies: Switch | None = said("Show the frequencies of TSC and APIC to the guest.")
    ipi: Switch | None = said("Send interrupts between vCPUs by the hypervisor.")
    reenlightenment: Switch | None = said("Notify the guest if the frequency of the TSC changes.")
    relaxed: Switch | None = said("Keep the guest's watchdog quiet while the host is busy.")
    reset: Switch | None = said("Let the guest reset itself by a Hyper-V register.")
    runtime: Switch | None = said("Show the run time of each vCPU to the guest.")
    spinlocks: Spinlocks | None = said("Notify the hypervisor of long spins on a lock.")
    synic: Switch | None = said("Synthetic interrupt controller.")
    synictimer: SynicTimer | None = said("Synthetic timers.")
    tlbflush: TlbFlush | None = said("Flush the TLB by the hypervisor.")
    vapic: Switch | None = said("Virtual APIC.")
    vendorid: VendorId | None = said("Vendor id of the hypervisor that the guest sees.")
    vpindex: Switch | None = said("Show each vCPU its index.")


class KvmFeature(Part):
    """KVM's paravirtual features."""

    hidden: bool | None = said("Hide the KVM signature from the guest.")


class Features(Part):
    """Features of the hypervisor that the guest can use."""

    acpi: Switch | None = said("ACPI. Without it, a guest cannot shut down on request.")
    apic: Apic | None = said("Interrupt controller (APIC).")
    hyperv: Hyperv | None = said("Hyper-V enlightenments for Windows guests.")
    hypervPassthrough: Switch | None = said(
        "Turn on all Hyper-V enlightenments that the host supports."
    )
    kvm: KvmFeature | None = said("Paravirtual features of KVM.")
    pvspinlock: Switch | None = said("Paravirtual spinlocks.")
    smm: Switch | None = said("System management mode. Secure boot needs it.")


class AcpiTables(Part):
    """ACPI tables that are read from Secret volumes."""

    msdmNameRef: str | None = said("Name of the volume with the MSDM table.")
    slicNameRef: str | None = said("Name of the volume with the SLIC table.")


class Bios(Part):
    """SeaBIOS."""

    useSerial: bool | None = said("Write the BIOS messages to the serial console.")


class Efi(Part):
    """OVMF, the EFI firmware."""

    persistent: bool | None = said("Keep the EFI variables after the VirtualMachineInstance ends.")
    secureBoot: bool | None = said(
        "Start only signed boot loaders. The default is true. Needs features.smm."
    )


class Bootloader(Part):
    """The firmware that boots the guest: bios (the default) or efi."""

    bios: Bios | None = said("Boot with SeaBIOS.")
    efi: Efi | None = said("Boot with OVMF.")


class KernelContainer(Part):
    """A container image with a kernel."""

    image: str = must("Name of the container image.")
    imagePullPolicy: str | None = said("Pull policy of the image: Always, IfNotPresent or Never.")
    imagePullSecret: str | None = said("Name of a Secret with the login for the registry.")
    initrdPath: str | None = said("Path of the initrd in the image.")
    kernelPath: str | None = said("Path of the kernel in the image.")


class KernelBoot(Part):
    """Direct boot of a kernel, without a boot loader."""

    container: KernelContainer | None = said("Container image with the kernel and the initrd.")
    kernelArgs: str | None = said("Kernel command line.")


class Firmware(Part):
    """The machine's firmware and its identity."""

    acpi: AcpiTables | None = said("ACPI tables of the vendor.")
    bootloader: Bootloader | None = said("Firmware that boots the guest: BIOS or EFI.")
    kernelBoot: KernelBoot | None = said("Boot a kernel directly, without a boot loader.")
    serial: str | None = said("Serial number of the system in SMBIOS.")
    uuid: str | None = said("UUID of the system in SMBIOS. cloud-init uses it as its instance id.")


class Chassis(Part):
    """The chassis information in SMBIOS."""

    asset: str | None = said("Asset tag of the chassis.")
    manufacturer: str | None = said("Manufacturer of the chassis.")
    serial: str | None = said("Serial number of the chassis.")
    sku: str | None = said("SKU number of the chassis.")
    version: str | None = said("Version of the chassis.")


class Machine(Part):
    """The machine type."""

    type: str | None = said(
        "Machine type of QEMU: q35 (the default on amd64), virt, or a version such as pc-q35-10.0."
    )


class IoThreads(Part):
    """I/O threads of disks."""

    supplementalPoolThreadCount: Int32 | None = said(
        "Number of I/O threads if ioThreadsPolicy is supplementalPool."
    )


class SevPolicy(Part):
    """The guest policy that the SEV firmware enforces."""

    encryptedState: bool | None = said("Also encrypt the CPU registers (SEV-ES).")


class Sev(Part):
    """AMD Secure Encrypted Virtualization (SEV)."""

    attestation: Empty | None = said(
        "Start the guest only after its owner has checked the launch measurement."
    )
    dhCert: str | None = said("Diffie-Hellman key of the guest's owner, in Base64.")
    policy: SevPolicy | None = said("Guest policy that the SEV firmware enforces.")
    session: str | None = said("Session data of the guest's owner, in Base64.")


class LaunchSecurity(Part):
    """Encrypted guest memory that the host cannot read: sev, snp or tdx."""

    sev: Sev | None = said("AMD SEV.")
    snp: Empty | None = said("AMD SEV-SNP.")
    tdx: Empty | None = said("Intel TDX.")


class CpuTopology(Part):
    """The CPU topology as it was observed."""

    cores: Int32 | None = said("Cores of each socket.")
    sockets: Int32 | None = said("Number of sockets.")
    threads: Int32 | None = said("Threads of each core.")


class Condition(Part):
    """One aspect of the object's state."""

    lastProbeTime: Time | None = said(
        "Time at which the condition was last checked.", nullable=True
    )
    lastTransitionTime: Time | None = said("Time at which the status last changed.", nullable=True)
    message: str | None = said("Explanation for people.")
    reason: str | None = said("Reason of the last transition, as one word.")
    status: str = must("Status of the condition: True, False or Unknown.")
    type: str = must("Type of the condition, such as Ready.")
